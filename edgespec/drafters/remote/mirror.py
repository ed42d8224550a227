"""The text that a target's machine and a draft server hold."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from edgespec.drafters.remote.messages import BadMessage, Change, pack_ids


class Mirror:
    """A text that both sides hold."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._crc = 0

    def change_to(self, text: Sequence[int]) -> Change:
        """Make it `text`; returns what the other side has to change."""
        keep = len(self.tokens)
        if list(text[:keep]) != self.tokens:
            keep = next((i for i, (a, b) in enumerate(zip(self.tokens, text, strict=False)) if a != b), len(text))
        ids = list(text[keep:])
        self._replace(keep, ids)
        return Change(keep, ids, self._crc)

    def apply(self, change: Change) -> None:
        """Change it as the other side did. Raises BadMessage where the two then differ."""
        if change.keep > len(self.tokens):
            raise BadMessage(f"it keeps {change.keep} tokens of a text of {len(self.tokens)}")
        self._replace(change.keep, change.ids)
        if self._crc != change.crc:
            raise BadMessage("the two sides hold different texts")

    def _replace(self, keep: int, ids: Sequence[int]) -> None:
        if keep < len(self.tokens):
            del self.tokens[keep:]
            self._crc = zlib.crc32(pack_ids(self.tokens))
        self.tokens += ids
        self._crc = zlib.crc32(pack_ids(ids), self._crc)
