"""The command line. stdout is data, stderr is talk; modules here import nothing heavy before a command runs."""
