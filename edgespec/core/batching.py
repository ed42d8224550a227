"""Generations that go on together, so that their sessions may do all of their forwards as one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BatchPeers:
    """Other sessions that are to have rows in the same forward.

    sessions  how many of them decode
    rows      of those, as far as is known: what they have asked for, or had in the forward before
    reads     whether others read their prompts in it
    """

    sessions: int
    rows: int
    prefilling: bool


SOLO = BatchPeers(0, 0, False)


@dataclass(frozen=True, slots=True)
class Yield:
    """A forward has been asked for and not been read yet. Whoever runs several generations lets the others go on as far
    as this, since the sessions may do all of their forwards as one.
    """


YIELD = Yield()
