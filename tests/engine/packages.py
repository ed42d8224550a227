"""Drafters of packages for engines on the toy runtime, and what an engine says with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from edgespec.autopilot.profile import DraftCost, Profile
from edgespec.autopilot.speculation import Speculation
from edgespec.autopilot.stats import DraftStats
from edgespec.backends.options import LoadOptions
from edgespec.backends.toy import load
from edgespec.core.draft_tree import DraftTree
from edgespec.core.drafter import Drafter, Outcome, TokenDraw
from edgespec.core.peers import Yield
from edgespec.core.protocols import Budget, Draft, Round, Step
from edgespec.core.sampling import SamplingParams
from edgespec.drafters.ngram import NgramDrafter
from edgespec.drafters.registry import DrafterSpec, SlotResources
from edgespec.engine.engine import Engine
from edgespec.engine.events import Event, Finished, Notice, Request
from edgespec.engine.loaded_drafter import LoadedDrafter
from edgespec.models.drafts import DrafterPlan
from edgespec.text.stream import Piece
from tests.engine.conftest import PLAIN, Cheap, list_loaded

GREEDY = SamplingParams(temperature=0)
TALE = Request("a tale of a tale of a tale", GREEDY, max_tokens=60)
FIXED, ADAPTIVE = 4, None


@dataclass
class Faults:
    """The method of a drafter that raises, how often it still does, and how many drafters were opened and closed."""

    method: str
    left: int
    opened: int = 0
    closed: int = 0

    def raise_in(self, method: str) -> None:
        if method == self.method and self.left:
            self.left -= 1
            raise RuntimeError("Something broke.")


@dataclass
class Flaky(NgramDrafter):
    """A drafter of a package: lookups that say they take time, and fail."""

    faults: Faults
    name: str = "flaky"
    is_free: bool = False
    is_async: bool = False

    def __post_init__(self) -> None:
        super().__init__()
        self.faults.opened += 1

    def begin(self, text: Sequence[int], draw: TokenDraw | None) -> None:
        self.faults.raise_in("begin")
        super().begin(text, draw)

    def pending_tokens(self, text: Sequence[int]) -> int:
        self.faults.raise_in("unread")
        return super().pending_tokens(text)

    def draft_async(self, text: Sequence[int], limit: Budget) -> Draft | None:
        self.faults.raise_in("draft_async")
        if not self.is_async:
            return None
        tree = DraftTree()
        list(super().expand(tree, text, limit))
        return Draft.chain(tree.tokens)

    def expand(self, tree: DraftTree, text: Sequence[int], limit: Budget) -> Iterator[None]:
        if self.faults.method == "expand" and self.faults.left:
            tree.add(-1, ord("?"), self.name, 50.0)
        self.faults.raise_in("expand")
        yield from super().expand(tree, text, limit)

    def observe(self, done: Round) -> Sequence[Outcome]:
        self.faults.raise_in("observe")
        return super().observe(done)

    def close(self) -> None:
        self.faults.closed += 1
        raise RuntimeError("Nobody wants to know.")


def add_package(name: str, make: Callable[[SlotResources], Drafter]) -> LoadedDrafter:
    return LoadedDrafter(DrafterPlan(DrafterSpec(name, "a drafter of a package", make)))


def open_toy(*drafters: LoadedDrafter, model: str = "tree") -> Engine:
    """The toy pair with lookups, its draft model and `drafters`; all that takes time is cheap."""
    engine = Engine(load(model, LoadOptions()), [*list_loaded(model=load("draft", LoadOptions())), *drafters], PLAIN)
    cost = DraftCost({1: 0.01}, 0.001)
    names = ("model", *(each.spec.name for each in drafters))
    engine.draft_stats = DraftStats(Profile({1: 1.0, 16: 1.1}, dict.fromkeys(names, cost)))
    engine.draft_stats.costs = Cheap(engine.draft_stats.costs.profile)
    return engine


@dataclass(frozen=True)
class Answer:
    """What an engine said."""

    tokens: tuple[int, ...]
    steps: tuple[Step, ...]
    notices: tuple[str, ...]
    origins: frozenset[str]

    @property
    def drafters(self) -> set[str]:
        """Those that have drafted anything that was verified."""
        decisions = [step.decision for step in self.steps if step.decision and step.n_drafted]
        return {name for decision in decisions for name in decision.drafter.split("+")}


def answer(engine: Engine, request: Request, speculation: Speculation | None = None) -> Answer:
    events: list[Event] = [e for e in engine.generate(request, speculation=speculation) if not isinstance(e, Yield)]
    last = events[-1]
    assert isinstance(last, Finished) and last.reason != "cancelled"
    return Answer(
        last.tokens,
        tuple(event for event in events if isinstance(event, Step)),
        tuple(event.text for event in events if isinstance(event, Notice)),
        frozenset(str(event.drafter) for event in events if isinstance(event, Piece) and event.drafter),
    )


def cheap(*names: str) -> DraftStats:
    stats = DraftStats(Profile({1: 1.0, 16: 1.1}, dict.fromkeys(names, DraftCost({1: 0.01}))))
    stats.costs = Cheap(stats.costs.profile)
    return stats
