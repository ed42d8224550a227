"""The scores of one forward: the contract, and its implementation for logits in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from edgespec.core.arrays import Ints, Logits
from edgespec.core.sampling import SamplingParams


class Scores(Protocol):
    """The target's logits of one forward: row 0 is the root, row i + 1 is draft node i. Valid until commit or prefill.

    A backend may return them before the forward has finished, or before it has started if the forward is shared. The
    first read then waits. A read raises Cancelled or BackendError.
    """

    @property
    def waited_s(self) -> float:
        """Seconds that reads of these scores have waited for the forward."""

    @property
    def peer_wait_s(self) -> float:
        """Seconds that another session's read waited for the same forward; 0 if a read of these scores waited."""

    @property
    def peer_rows(self) -> int | None:
        """Rows of other sessions in the same forward; None if it also read prompts."""

    def argmax(self) -> Ints:
        """[rows] the id of the highest logit in each row; the lowest of equal ones."""

    def draw(self, params: SamplingParams, uniforms: Sequence[float]) -> Ints | None:
        """[rows] a token for each row: the inverse of its cumulative distribution at `uniforms` [rows].

        Computed by the backend, so that logits need not be copied to the host. `params` have no penalties and no bias.
        -1 marks a row where rounding could change the token. None if the backend leaves sampling to
        `Sampler.distribution`.
        """

    def logits(self, row: int) -> Logits:
        """[V] raw logits of one row; a view that the caller must not write to."""

    def host_logits(self, row: int) -> Logits | None:
        """`logits(row)` if they are in host memory already, so that nothing is waited for or copied; else None."""


class HostScores:
    """Scores over `rows` of logits, n x [V], that are in host memory and not overwritten."""

    waited_s = peer_wait_s = 0.0
    peer_rows = 0

    def __init__(self, rows: Sequence[Logits]) -> None:
        self._rows = rows

    def argmax(self) -> Ints:
        return np.array([row.argmax() for row in self._rows], np.int32)

    def draw(self, params: SamplingParams, uniforms: Sequence[float]) -> Ints | None:
        return None

    def logits(self, row: int) -> Logits:
        return self._rows[row]

    def host_logits(self, row: int) -> Logits | None:
        return self._rows[row]
