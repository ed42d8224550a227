"""Toy sessions that note what is run, run lazily, or are cancelled late."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from edgespec.backends.toy_session import ToyModel, ToySession
from edgespec.core.arrays import Logits
from edgespec.core.decoding import decode_one, score_tokens
from edgespec.core.peers import Yield
from edgespec.core.protocols import Draft, PrefillProgress, Session
from edgespec.core.scores import HostScores, Scores
from edgespec.errors import Cancelled

V = 8
MODEL = ToyModel(seed=5, vocab_size=V, order=3, sharpness=1.5)
TEXT = [1, 2, 3, 4, 5, 6, 7, 0, 1, 2]


class CountingSession(ToySession):
    """Notes what was run; takes at most `most` draft tokens in a forward."""

    def __init__(
        self,
        most: int = 256,
        context_size: int = 256,
        *,
        model: ToyModel = MODEL,
    ) -> None:
        super().__init__(model, context_size=context_size, chunk=4)
        self._most = most
        self.prefills: list[list[int]] = []
        self.rows: list[int] = []

    @property
    def draft_limit(self) -> int:
        return min(self._most, super().draft_limit)

    def prefill(self, tokens: Sequence[int]) -> Generator[PrefillProgress | Yield, None, Scores]:
        self.prefills.append([])
        events = super().prefill(tokens)
        while True:
            try:
                event = next(events)
            except StopIteration as end:
                scores: Scores = end.value
                return scores
            assert isinstance(event, PrefillProgress)
            self.prefills[-1].append(event.done)
            yield event

    def forward(self, root: int, draft: Draft, *, run_ahead: bool = False) -> Scores:
        assert len(draft) <= self.draft_limit
        self.rows.append(1 + len(draft))
        return super().forward(root, draft, run_ahead=run_ahead)


class LazySession(CountingSession):
    """Makes chains that the host has not read."""

    def rollout(self, tokens: Sequence[int], n: int, vocab_size: int) -> tuple[Draft, Scores]:
        chain = decode_greedily(self, tokens, n, vocab_size)
        return Draft.chain(chain), HostScores([])


class LateScores(HostScores):
    def logits(self, row: int) -> Logits:
        raise Cancelled


class LateSession(CountingSession):
    """Cancelled while the scores of forward number `cancelled` are waited for."""

    cancelled = 0

    def forward(self, root: int, draft: Draft, *, run_ahead: bool = False) -> Scores:
        scores = super().forward(root, draft, run_ahead=run_ahead)
        return LateScores(()) if len(self.rows) == self.cancelled else scores


def decode_greedily(session: Session, tokens: Sequence[int], n: int, vocab_size: int) -> list[int]:
    """Run `tokens`, then decode `n` tokens, each the best id below `vocab_size`; the last one is not run."""
    found = [int(score_tokens(session, tokens)[:vocab_size].argmax())]
    while len(found) < n:
        found.append(int(decode_one(session, found[-1])[:vocab_size].argmax()))
    return found


def held(session: ToySession) -> list[int]:
    """The tokens in the cache."""
    return list(session._cache)
