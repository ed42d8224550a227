"""Shapes of llama models: the named ones to embed into, and whether a small one fits."""

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
        """Query heads of a kv head."""
        return self.heads // self.kv_heads


@dataclass(frozen=True)
class Size:
    """A shape but for its heads, which take the source's head width: width, layers, width of all keys, ffn width."""

    width: int
    layers: int
    kv_width: int
    ffn: int

    def with_heads(self, head: int) -> Shape:
        return Shape(self.width, self.layers, self.width // head, self.kv_width // head, self.ffn, head)


# The last four are Llama 3.2 1B and 3B, 3.1 8B and 3.3 70B.
SHAPES = {
    "30m": Size(512, 8, 256, 1536),
    "100m": Size(768, 12, 256, 3072),
    "300m": Size(1024, 20, 256, 4096),
    "1b": Size(2048, 16, 512, 8192),
    "3b": Size(3072, 28, 1024, 8192),
    "8b": Size(4096, 32, 1024, 14336),
    "70b": Size(8192, 80, 1024, 28672),
}


def shape_for(name: str, small: Shape) -> Shape:
    """SHAPES[name] with heads as wide as those of `small`, which has to fit. Raises click.ClickException."""
    size = SHAPES[name]
    if size.kv_width % small.head or size.width % small.head:
        raise click.ClickException(
            f"heads of {small.head} numbers, the source's, do not divide the {name} shape evenly."
        )
    large = size.with_heads(small.head)
    for what, there, needed in (
        ("width", large.width, small.width),
        ("layers", large.layers, small.layers),
        ("kv heads", large.kv_heads, small.kv_heads),
        ("query heads for a kv head", large.group, small.group),
        ("ffn width", large.ffn, small.ffn),
    ):
        if there < needed:
            raise click.ClickException(f"the source does not fit into the {name} shape: {what} {needed} > {there}.")
    return large


def tightest(small: Shape, large: Shape, block: int) -> Shape:
    """The smallest shape for `small` whose rows are whole blocks, shared by the same heads as in `large`."""

    def whole(n: int) -> int:
        return -(-n // block) * block

    heads, kv_heads = small.heads, small.kv_heads
    if small.head % block:  # heads share blocks
        kv_heads = large.kv_heads if small.kv_heads * large.group * small.head % block else small.kv_heads
        heads = kv_heads * large.group
    return Shape(whole(small.width), small.layers, heads, kv_heads, whole(small.ffn), small.head)
