"""A draft model's session that follows the text of a slot: what is unread, reading it, dropping drafted tokens."""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.core.protocols import NO_DRAFT, Draft, Session
from edgespec.core.verify import read_prompt


class TextReader:
    """Follows a text on a session, which may hold the text's end alone."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._offset = 0  # tokens at the beginning of the text that the session does not read
        self._is_prefilled = False
        self.text: list[int] = []  # the `_base` tokens that were emitted, then the drafted ones
        self._base = 0
        self._chain = NO_DRAFT  # drafted after them, and read by the next `settle`

    def begin(self, text: Sequence[int]) -> None:
        """`text` follows; keeps what the session holds of it."""
        kept, self._chain = 0, NO_DRAFT
        while kept < min(len(self.text), len(text) - 1) and self.text[kept] == text[kept]:
            kept += 1
        if self.session.capabilities.shares_kv or not self._is_prefilled or kept <= self._offset:
            self._offset, self._is_prefilled, kept = 0, False, 0
        else:  # also drops a forward that was cancelled
            kept = self._offset + self.session.rewind(min(kept - self._offset, self.session.position))
        del self.text[kept:]
        self._base = kept

    def pending_tokens(self, text: Sequence[int]) -> int:
        """Tokens of `text` that the session has not read. Drops the drafted ones that are not in it."""
        self.settle(text)
        is_held = self._is_prefilled or self.session.capabilities.shares_kv
        return len(text) - (self._offset + self.session.position if is_held else 0)

    def prepare(self, text: Sequence[int], window: int, rows: int = 0) -> list[int] | None:
        """Read so much of `text` that the rest, at least one token, and `rows` more fit one forward; returns the rest.

        If more than `window` tokens are unread, or more than the context holds, the session reads only the last ones.
        None if one of them is not in its vocabulary. Raises Cancelled, BackendError.
        """
        session, limits = self.session, self.session.capabilities
        window = max(1, min(window, limits.context_size // 2))
        unread = self.pending_tokens(text)
        if unread > window or len(text) + rows - self._offset > limits.context_size:
            self._offset, self._is_prefilled = len(text) - min(window, len(text)), False
        if max(text[self._offset + (session.position if self._is_prefilled else 0) :]) >= limits.vocab_size:
            return None
        if not self._is_prefilled or unread - 1 + rows > session.draft_limit:
            if len(text) - self._offset > 1:
                read_prompt(session, text[self._offset : -1])  # reuses what the cache still holds
            else:
                session.rewind(0)
            self._is_prefilled = True
        self.text += text[len(self.text) :]
        self._base = len(text)
        return list(text[self._offset + session.position :])

    def append(self, token: int) -> None:
        """The session holds one more drafted token."""
        self.text.append(token)

    def append_unread(self, chain: Draft) -> None:
        """Tokens were drafted that the host has not read; the session may hold fewer of them."""
        self._chain = chain

    def close(self) -> None:
        self.session.close()

    def settle(self, text: Sequence[int]) -> None:
        """Remove drafted tokens that are not in `text`, prompt and output, from the session."""
        self.text += self._chain.tokens.tolist()
        self._chain = NO_DRAFT
        agreed = min(self._base, len(text) - 1)
        while agreed < min(len(self.text), len(text) - 1) and self.text[agreed] == text[agreed]:
            agreed += 1
        if agreed - self._offset < self.session.position:
            self.session.rewind(max(0, agreed - self._offset))
        del self.text[agreed:]
        self._base = agreed
