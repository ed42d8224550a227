"""A pair of models for other engines: the command that serves it there, and the files that the command needs."""
