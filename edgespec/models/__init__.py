"""Models on this machine and on the hub: their names, files, memory, speed and drafts. Nothing here loads weights."""
