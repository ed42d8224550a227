"""Texts for the tests of the memory, and what is left of them in files."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from edgespec.memory.memory import Memory
from edgespec.memory.space import MemorySpace

N_LONG = 20_000  # tokens: enough for a segment


def make_tokens(seed: int, n: int = N_LONG) -> list[int]:
    """Tokens that no other seed has in this order."""
    tokens: list[int] = np.random.default_rng(seed).integers(0, 50_000, n).tolist()
    return tokens


def has_text(space: MemorySpace, tokens: list[int], end: int = 100) -> bool:
    """Whether what follows the first `end` of `tokens` is found after them."""
    matches = space.find(tokens[:end], 1)
    return matches is not None and matches.places[0].read(5) == tokens[end : end + 5]


def find_bytes(folder: Path, tokens: list[int]) -> set[str]:
    """The files that have four successive tokens of `tokens` in any order of bytes and of tokens."""
    found = set()
    for file in folder.rglob("*"):
        if file.is_file():
            data = file.read_bytes()
            for i in range(0, len(tokens) - 4, 500):
                part = np.array(tokens[i : i + 4], np.uint32)
                forms = (
                    part.tobytes(),
                    part[::-1].tobytes(),
                    part.byteswap().tobytes(),
                    part[::-1].byteswap().tobytes(),
                )
                if any(form in data for form in forms):
                    found.add(file.name)
    return found


def build(memory: Memory) -> None:
    """Have the indexes of all texts built now."""
    memory.set_idle(True)
    memory.flush()
    memory.set_idle(False)
