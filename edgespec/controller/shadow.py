"""Shadow drafts: drafts that the regret budget does not allow, compared with the text that is emitted instead."""

from __future__ import annotations

from collections.abc import Sequence


class ShadowDraft:
    """One path at a time."""

    def __init__(self) -> None:
        self._start = 0
        self._draft: list[int] = []
        self._nodes = 0

    @property
    def is_pending(self) -> bool:
        return bool(self._draft)

    def remember(self, start: int, path: list[int], nodes: int) -> None:
        """The most probable `path` of a draft of `nodes` nodes continues the text at position `start`."""
        self._start, self._draft, self._nodes = start, path, nodes

    def resolve(self, text: Sequence[int]) -> tuple[int, int] | None:
        """(tokens that the round would have emitted, rows of its forward); None while `text` is too short to tell."""
        draft, n_right = self._draft, 0
        if not draft:
            return None
        for drafted, emitted in zip(draft, text[self._start :], strict=False):
            if drafted != emitted:
                break
            n_right += 1
        if n_right < len(draft) and self._start + n_right >= len(text):
            return None
        self._draft = []
        return n_right + 1, self._nodes + 1
