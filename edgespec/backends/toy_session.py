"""Toy sessions: logits are a seeded function of the last tokens, under the same contract as real sessions."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from edgespec.backends.checkpoints import Checkpoints
from edgespec.backends.sequence import check_committed, check_forward, check_prompt, kept_tokens, shared_prefix
from edgespec.cancel import check_cancelled
from edgespec.core.arrays import Logits
from edgespec.core.peers import SOLO, Yield
from edgespec.core.protocols import Capabilities, Draft, PrefillProgress, Session
from edgespec.core.scores import HostScores, Scores


@dataclass(frozen=True)
class ToyModel:
    """A Markov source: logits [V] depend on `seed` and the last `order` tokens; `sharpness` scales them."""

    seed: int = 0
    vocab_size: int = 16
    order: int = 3
    sharpness: float = 2.0

    def logits(self, prefix: Sequence[int]) -> Logits:
        rng = np.random.default_rng(np.array((self.seed, *prefix[-self.order :]), np.uint32))  # a tuple takes long
        return (rng.standard_normal(self.vocab_size) * self.sharpness).astype(np.float32)


Kind = Literal["linear", "tree", "recurrent"]


class ToySession:
    """A session whose cache is trimmed anywhere, for chains or trees, or goes back to checkpoints alone."""

    peers = SOLO

    def __init__(self, model: ToyModel, *, kind: Kind = "tree", context_size: int = 256, chunk: int = 8) -> None:
        self.model = model
        self.capabilities = Capabilities(model.vocab_size, context_size, kind == "tree")
        self._is_recurrent = kind == "recurrent"
        self._chunk = chunk
        self._cache: list[int] = []
        self._checkpoints = Checkpoints[None]()
        self._pending: tuple[int, Draft] | None = None

    @property
    def position(self) -> int:
        return len(self._cache)

    @property
    def draft_limit(self) -> int:
        return max(0, self.capabilities.context_size - self.position - 1)

    def prefill(self, tokens: Sequence[int]) -> Generator[PrefillProgress | Yield, None, Scores]:
        check_prompt(tokens, self.capabilities)
        done = reused = self.rewind(shared_prefix(self._cache, tokens, len(tokens) - 1))
        while done < len(tokens):
            check_cancelled()
            done = min(done + self._chunk, len(tokens))
            self._cache += tokens[self.position : done]
            yield PrefillProgress(done, len(tokens), reused)
        return HostScores([self.model.logits(self._cache)])

    def adopt(self, other: Session, n: int) -> bool:
        if not isinstance(other, ToySession) or self._is_recurrent:
            return False
        self._pending = None
        self._cache = other._cache[:n]
        return True

    def forward(self, root: int, draft: Draft, *, run_ahead: bool = False) -> Scores:
        check_cancelled()
        check_committed(self._pending)
        check_forward(self, root, draft)
        base = (*self._cache, root)
        prefixes = [base]
        for token, parent in zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True):
            prefixes.append((*prefixes[parent + 1], token))
        self._pending = (root, draft)
        return HostScores([self.model.logits(prefix) for prefix in prefixes])

    def commit(self, path: Sequence[int]) -> None:
        self._cache += kept_tokens(self._pending, path)
        self._pending = None

    def checkpoint(self) -> None:
        self._checkpoints.add(self.position, None, 0)

    def rewind(self, position: int) -> int:
        self._pending = None
        found = self._checkpoints.cut(position)
        if self._is_recurrent and position < self.position:
            position = found[0] if found is not None else 0
        del self._cache[position:]
        return self.position

    @property
    def can_cut(self) -> bool:
        return not self._is_recurrent

    def save_state(self, limit: int) -> memoryview | None:
        return memoryview(bytes(self.position)) if self.position <= limit else None

    def restore_state(self, tokens: Sequence[int], state: memoryview) -> bool:
        self.rewind(0)
        if len(state) != len(tokens):
            return False
        self._cache = list(tokens)
        self.checkpoint()
        return True

    def close(self) -> None:
        self._cache = []
