"""Drafters whose random draws are enumerated, and the adaptive controller with fixed costs, for proofs of the loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from edgespec.autopilot.adaptive import Adaptive
from edgespec.autopilot.cost_model import CostModel
from edgespec.autopilot.profile import DraftCost, Profile
from edgespec.autopilot.stats import DraftStats
from edgespec.backends.toy_session import ToySession
from edgespec.core.arrays import Logits, Probs
from edgespec.core.draft_tree import DraftTree
from edgespec.core.drafter import Drafter, TokenDraw
from edgespec.core.protocols import Budget, Draft
from edgespec.drafters.sequential import ModelDraftSession, SequentialDrafter
from tests.core.enumerate import Enumerated, Proposal, Target, normalised


@dataclass
class Fixed(Drafter):
    """Proposes the same deterministic tree in every round."""

    draft: Draft
    name: str = "fixed"

    def expand(self, tree: DraftTree, text: Sequence[int], limit: Budget) -> Iterator[None]:
        nodes: list[int] = []
        for token, parent in zip(self.draft.tokens.tolist(), self.draft.parents.tolist(), strict=True):
            nodes.append(tree.add(nodes[parent] if parent >= 0 else -1, token, self.name, 0.9))
            yield


@dataclass
class Drawn(Drafter):
    """Draws a chain from `q`; `is_last` looks at the drawn tokens and may end it early."""

    q: Proposal
    random_source: Enumerated
    is_last: Callable[[Sequence[int]], bool] = lambda drawn: False
    name: str = "drawn"
    is_drawn: bool = True

    def expand(self, tree: DraftTree, text: Sequence[int], limit: Budget) -> Iterator[None]:
        drawn: list[int] = []
        while len(drawn) < limit.depth and not (drawn and self.is_last(drawn)):
            q = self.q((*text, *drawn))
            drawn.append(self.random_source.choose(q, len(text)))
            tree.add(len(drawn) - 2, drawn[-1], self.name, float(q[drawn[-1]]), q)
            yield


@dataclass
class EnumeratedDraw:
    """A TokenDraw by the sampler chain of `model`, as RequestDraw but with enumerated draws."""

    model: Target
    random_source: Enumerated
    takes_trees: bool = False

    def draw(self, logits: Logits, prefix: Sequence[int]) -> tuple[int, Probs]:
        return self.draw_siblings(logits, prefix, 1)[0]

    def draw_siblings(self, logits: Logits, prefix: Sequence[int], n: int) -> list[tuple[int, Probs]]:
        rest, found = self.model.distribution(logits, prefix).dense(self.model.vocab_size), list[tuple[int, Probs]]()
        while len(found) < n and rest.any():
            q = normalised(rest)
            found.append((self.random_source.choose(q, len(prefix)), q))
            rest = rest.copy()
            rest[found[-1][0]] = 0
        return found


class TwoRows:
    """A BlockSession: rows for two positions, the first after the text, the second after an unknown token."""

    block_size = 2

    def __init__(self, model: Target) -> None:
        self._model = model

    def begin(self, text: Sequence[int]) -> None: ...

    def pending_tokens(self, text: Sequence[int]) -> int:
        return 0

    def block(self, text: Sequence[int], window: int, n: int) -> list[Logits]:
        return [self._model.logits((*text, *[9] * i)) for i in range(n)]

    def close(self) -> None: ...


class Still(CostModel):
    """A cost model that measures nothing, so that two runs decide alike."""

    def observe(self, rows: int, position: int, seconds: float) -> None: ...

    def observe_drafting(self, drafter: str, seconds: float, expected_s: float) -> None: ...

    def count_recent(self, rows: int) -> int:
        return 9


def make_adaptive(
    drafters: Sequence[Drafter], vocab_size: int, draw: TokenDraw | None, kind: type[Adaptive] = Adaptive
) -> Adaptive:
    """Without experience; drafting costs so much that improbable paths are not continued."""
    stats = DraftStats(
        Profile({1: 1.0, 2: 1.01, 9: 1.1}, {"model": DraftCost({1: 0.2}), "block": DraftCost({1: 0.1, 2: 0.1})})
    )
    stats.costs = Still(stats.costs.profile)
    return kind(drafters, stats, "toy", vocab_size, takes_trees=lambda: True, draw=draw)


def model_drafter(model: Target) -> SequentialDrafter:
    return SequentialDrafter("model", ModelDraftSession(ToySession(model), model.vocab_size))  # type: ignore[arg-type]
