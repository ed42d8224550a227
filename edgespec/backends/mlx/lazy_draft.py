"""Drafts that stay on the device, where the target can score them before the host has read them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np

from edgespec.backends.mlx.library import read
from edgespec.core.arrays import Ints
from edgespec.core.protocols import Draft


class DeviceDraft(Draft):
    """A chain of best tokens in an array [n] that the device may still compute.

    The scores of the target's forward on it bring the tokens along. Reading `tokens` before that waits for the device.
    """

    array: Any

    def __init__(self, array: Any) -> None:
        object.__setattr__(self, "array", array.astype(mx.int32))
        object.__setattr__(self, "parents", np.arange(-1, array.size - 1, dtype=np.int32))
        object.__setattr__(self, "q", None)
        object.__setattr__(self, "sources", ())

    @cached_property
    def tokens(self) -> Ints:
        return read(self.array)[0]

    def receive(self, tokens: Ints) -> None:
        """The host has read the array together with something else."""
        self.__dict__.setdefault("tokens", tokens)

    def __len__(self) -> int:
        return len(self.parents)


def chain_rows(known_tokens: Sequence[int], draft: Draft) -> Any:
    """[1, n] the tokens of a chain's forward. Does not wait for those that are on the device."""
    rows = mx.array(list(known_tokens), mx.int32)
    if not isinstance(draft, DeviceDraft):
        return mx.concatenate([rows, mx.array(draft.tokens)])[None]
    return mx.concatenate([rows, draft.array])[None]
