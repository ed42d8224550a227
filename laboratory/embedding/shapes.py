"""Shapes of llama models: the named large ones, and the check that a small one fits."""

from __future__ import annotations

from dataclasses import dataclass

import click


@dataclass(frozen=True)
class Shape:
    """Width, layers, query heads, kv heads, ffn width and head width of a llama model."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    head: int

    @property
    def group(self) -> int:
        """Query heads per kv head."""
        return self.heads // self.kv_heads


@dataclass(frozen=True)
class Size:
    """A shape without head width, which is the source's: width, layers, width of all keys, ffn width."""

    width: int
    layers: int
    kv_width: int
    ffn: int

    def with_heads(self, head: int) -> Shape:
        """The shape for heads of `head` numbers."""
        return Shape(self.width, self.layers, self.width // head, self.kv_width // head, self.ffn, head)


# The last four are the shapes of Llama 3.2 1B and 3B, 3.1 8B and 3.3 70B.
SHAPES = {
    "30m": Size(512, 8, 256, 1536),
    "100m": Size(768, 12, 256, 3072),
    "300m": Size(1024, 20, 256, 4096),
    "1b": Size(2048, 16, 512, 8192),
    "3b": Size(3072, 28, 1024, 8192),
    "8b": Size(4096, 32, 1024, 14336),
    "70b": Size(8192, 80, 1024, 28672),
}
OWN = "own"  # the shape of the source itself, which is then copied


def fit_shape(name: str, small: Shape) -> Shape:
    """SHAPES[name] with heads as wide as those of `small`, or `small` itself for OWN.

    Raises click.ClickException where `small` does not fit.
    """
    if name == OWN:
        return small
    size = SHAPES[name]
    if size.kv_width % small.head or size.width % small.head:
        raise click.ClickException(f"the source's heads of {small.head} numbers do not divide the {name} shape evenly.")
    large = size.with_heads(small.head)
    for dimension, available, needed in (
        ("width", large.width, small.width),
        ("layers", large.layers, small.layers),
        ("kv heads", large.kv_heads, small.kv_heads),
        ("query heads per kv head", large.group, small.group),
        ("ffn width", large.ffn, small.ffn),
    ):
        if available < needed:
            raise click.ClickException(
                f"the source does not fit into the {name} shape: {dimension} {needed} > {available}."
            )
    return large


def find_tightest_shape(small: Shape, large: Shape, block: int) -> Shape:
    """The smallest shape for `small` whose rows are whole blocks, with heads that share blocks as in `large`."""

    def round_up(n: int) -> int:
        return -(-n // block) * block

    heads, kv_heads = small.heads, small.kv_heads
    if small.head % block:  # blocks span heads
        kv_heads = large.kv_heads if small.kv_heads * large.group * small.head % block else small.kv_heads
        heads = kv_heads * large.group
    return Shape(round_up(small.width), small.layers, heads, kv_heads, round_up(small.ffn), small.head)
