"""What a generation knows of the others that it is batched with, and the point where it lets them go on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BatchPeers:
    """Other sessions with rows in the same forward.

    sessions    how many of them decode
    rows        of those: as submitted for this forward, else as in the one before
    prefilling  whether others read prompts in it
    """

    sessions: int
    rows: int
    prefilling: bool


SOLO = BatchPeers(0, 0, False)


@dataclass(frozen=True, slots=True)
class Yield:
    """A forward has been submitted and its scores not been read. A scheduler runs the other generations up to the same
    point before it continues this one, so that their sessions can compute all forwards as one batch.
    """


YIELD = Yield()
