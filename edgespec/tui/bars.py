"""Bars made of block characters."""

from __future__ import annotations


def draw_bar(share: float, width: int) -> str:
    """A horizontal bar of `width` cells, filled in eighths of a cell; `share` is clipped to 0..1."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    full, part = divmod(eighths, 8)
    return ("█" * full + (" ▏▎▍▌▋▊▉"[part] if part else "")).ljust(width)


def draw_column(share: float) -> str:
    """A vertical bar of one cell; `share` is clipped to 0..1."""
    return "▁▂▃▄▅▆▇█"[round(max(0.0, min(1.0, share)) * 7)]
