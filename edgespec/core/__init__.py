"""The decoding loop, sampling and the acceptance rules. Needs numpy only: no backend, no user interface, no I/O."""
