"""The place in an answer where free text ends and a grammar begins, which may be inside of a token."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from edgespec.core.arrays import Logits
from edgespec.core.sampling import Distribution, Sampler, SamplingParams
from edgespec.core.verify import TargetDistribution
from edgespec.engine.grammar_mask import forbid
from edgespec.text.tokenizer import Tokenizer, encode_inside

if TYPE_CHECKING:
    from llguidance import LLMatcher


class Boundary:
    """The tokens of a vocabulary that hold the end of a marker together with text behind it, such as ">{"."""

    def __init__(self, tokenizer: Tokenizer, markers: Iterable[str]) -> None:
        """Reads the whole vocabulary."""
        self.tokenizer = tokenizer
        self._rests: dict[bytes, dict[int, bytes]] = {}  # by the bytes before the token that complete the marker
        encoded = [marker.encode() for marker in markers]
        self.width = max(map(len, encoded), default=0)
        spelled = set(encoded)
        for token in range(tokenizer.vocab_size):
            piece = tokenizer.piece(token)
            spelled.discard(piece or tokenizer.special_text(token).encode())
            for marker in encoded:
                self._add(token, piece, marker)
        self.is_crossed = b"" in self._rests or bool(spelled and self._rests)
        """Whether a model may write such a token. A marker that is a token of its own is not spelled with others."""

    def rests(self, before: bytes) -> Mapping[int, bytes]:
        """The tokens that complete a marker after the bytes `before`, with what they hold behind it."""
        found: dict[int, bytes] = {}
        for missing, rests in self._rests.items():
            if before.endswith(missing):
                found.update(rests)
        return found

    def _add(self, token: int, piece: bytes, marker: bytes) -> None:
        if marker[-1:] not in piece[:-1]:  # of most tokens
            return
        if rest := piece.partition(marker)[2]:
            self._rests.setdefault(b"", {})[token] = rest
        for n in range(1, len(marker)):
            if piece.startswith(marker[-n:]) and len(piece) > n:
                self._rests.setdefault(marker[:-n], {})[token] = piece[n:]


class BlockEntry:
    """Begins the grammar of a block. What the last token of the marker holds behind it belongs to the block."""

    def __init__(self, boundary: Boundary, matcher: LLMatcher) -> None:
        """`matcher` is at the beginning of the grammar."""
        self.boundary = boundary
        self._matcher = matcher
        self._takes: dict[bytes, bool] = {}

    def begin(self, before: bytes, token: int) -> LLMatcher:
        """The matcher behind `token`, which completes a marker after the bytes `before`.

        Raises BackendError if the grammar does not take the rest of the token.
        """
        rest = self.boundary.rests(before).get(token, b"")
        if (matcher := self._advance(rest)) is None:
            raise forbid(f"token {token}")
        return matcher

    def limit(self, sampler: Sampler) -> TargetDistribution:
        """The distribution of the free text. Where a token may hold text behind a marker, tokens are excluded if the
        grammar does not take that text.
        """
        return _FreeText(self, sampler) if self.boundary.is_crossed else sampler

    def list_refused(self, before: bytes) -> list[int]:
        """The tokens that complete a marker after the bytes `before` and hold what the grammar does not take."""
        return [token for token, rest in self.boundary.rests(before).items() if not self._take(rest)]

    def _take(self, rest: bytes) -> bool:
        if rest not in self._takes:
            self._takes[rest] = self._advance(rest) is not None
        return self._takes[rest]

    def _advance(self, rest: bytes) -> LLMatcher | None:
        """A matcher behind `rest`; None if the grammar does not take it."""
        try:
            tokens = encode_inside(self.boundary.tokenizer, rest.decode())
        except UnicodeDecodeError:  # a character that has begun
            return None
        matcher = self._matcher.deep_copy()
        is_taken = tokens is not None and matcher.try_consume_tokens(tokens) == len(tokens)
        return matcher if is_taken else None


class _FreeText:
    """The distribution of a sampler without the tokens that a BlockEntry refuses. A TargetDistribution."""

    row_params: SamplingParams | None = None

    def __init__(self, entry: BlockEntry, sampler: Sampler) -> None:
        self.window = max(sampler.window, entry.boundary.width)
        self._entry = entry
        self._sampler = sampler

    def distribution(self, logits: Logits, prefix: Sequence[int]) -> Distribution:
        boundary = self._entry.boundary
        before = b"".join(map(boundary.tokenizer.piece, prefix[-boundary.width :]))
        if refused := self._entry.list_refused(before):
            logits = logits.copy()
            logits[refused] = -np.inf
        return self._sampler.distribution(logits, prefix)
