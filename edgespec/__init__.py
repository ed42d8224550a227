"""edgespec: speculative decoding on your own machine, with exactly the target's distribution."""

__version__ = "0.1.0"
