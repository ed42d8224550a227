"""The decoding loop and its rules: numpy and the standard library only; no runtime, no UI, no I/O."""
