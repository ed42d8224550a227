"""This machine's memory, and the machines that compute a model together with it."""
