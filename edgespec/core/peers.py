"""Batching with other generations: what is known of them, and the point at which each yields."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BatchPeers:
    """Other sessions with rows in the same forward.

    sessions    how many of them decode
    rows        their rows in this forward; of a session that has not submitted any yet, those of the previous one
    prefilling  whether others read prompts in it
    """

    sessions: int
    rows: int
    prefilling: bool


SOLO = BatchPeers(0, 0, False)


@dataclass(frozen=True, slots=True)
class Yield:
    """A forward has been submitted, and its scores are not read yet. A scheduler runs the other generations up to the
    same point before it continues this one, so that their sessions can compute all forwards as one batch.
    """


YIELD = Yield()
