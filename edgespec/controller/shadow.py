"""Drafts that there was no room for, followed in the text to see what would have become of them."""

from __future__ import annotations

from collections.abc import Sequence


class ShadowDraft:
    """One chain at a time."""

    def __init__(self) -> None:
        self._start = 0
        self._draft: list[int] = []

    @property
    def pending(self) -> bool:
        return bool(self._draft)

    def remember(self, start: int, draft: list[int]) -> None:
        """`draft` would have begun at position `start` of the text."""
        self._start, self._draft = start, draft

    def outcome(self, text: Sequence[int]) -> tuple[int, int] | None:
        """(tokens that the round would have emitted, its rows), once the text shows it."""
        draft, right = self._draft, 0
        if not draft:
            return None
        for drafted, emitted in zip(draft, text[self._start :], strict=False):
            if drafted != emitted:
                break
            right += 1
        if right < len(draft) and self._start + right >= len(text):
            return None
        self._draft = []
        return right + 1, len(draft) + 1
