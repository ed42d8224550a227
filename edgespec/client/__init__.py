"""An engine behind a thread or a process, for front ends."""
