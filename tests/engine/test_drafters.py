"""Any number of drafters in one engine: together, some of them, none; drafters that fail, and what is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import pytest

from edgespec.backends import open_model
from edgespec.backends.attached_draft import parse
from edgespec.backends.options import LoadOptions
from edgespec.backends.toy.model import load
from edgespec.controller.cost_model import DraftCost, Profile
from edgespec.controller.stats import DraftStats
from edgespec.core.batching import Yield
from edgespec.core.draft_tree import DraftTree
from edgespec.core.drafter import Drafter, Outcome, TokenDraw
from edgespec.core.protocols import Budget, Draft, Round, Step
from edgespec.core.sampling import SamplingParams
from edgespec.drafters import DrafterSpec, SlotResources
from edgespec.drafters.ngram import NgramDrafter
from edgespec.engine.drafting import LoadedDrafter, Speculation
from edgespec.engine.engine import Engine
from edgespec.engine.events import Event, Finished, Notice, Request
from edgespec.errors import BackendError, Cancelled, DraftRefused, EdgespecError, InvalidRequest
from edgespec.text.stream import Piece
from tests.core.toys import Alarm
from tests.engine.conftest import PLAIN, Cheap, generate, list_loaded
from tests.engine.prompts import CODE
from tests.models import DRAFT, TARGET, hybrid

GREEDY = SamplingParams(temperature=0)
TALE = Request("a tale of a tale of a tale", GREEDY, max_tokens=60)
METHODS = ("begin", "unread", "draft_unread", "expand", "observe")


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
    is_lazy: bool = False

    def __post_init__(self) -> None:
        super().__init__()
        self.faults.opened += 1

    def begin(self, text: Sequence[int], draw: TokenDraw | None) -> None:
        self.faults.raise_in("begin")
        super().begin(text, draw)

    def unread(self, text: Sequence[int]) -> int:
        self.faults.raise_in("unread")
        return super().unread(text)

    def draft_unread(self, text: Sequence[int], limit: Budget) -> Draft | None:
        self.faults.raise_in("draft_unread")
        if not self.is_lazy:
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
    return LoadedDrafter(DrafterSpec(name, "a drafter of a package", make), name)


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
        return {name for decision in decisions for name in decision.source.split("+")}


def answer(engine: Engine, request: Request, speculation: Speculation | None = None) -> Answer:
    events: list[Event] = [e for e in engine.generate(request, speculation=speculation) if not isinstance(e, Yield)]
    last = events[-1]
    assert isinstance(last, Finished) and last.reason != "cancelled"
    return Answer(
        last.tokens,
        tuple(event for event in events if isinstance(event, Step)),
        tuple(event.text for event in events if isinstance(event, Notice)),
        frozenset(str(event.origin) for event in events if isinstance(event, Piece) and event.origin),
    )


FIXED, ADAPTIVE = 4, None


@pytest.mark.parametrize(
    ("method", "length"),
    [(method, length) for method in METHODS for length in (FIXED, ADAPTIVE) if (method, length) != ("unread", FIXED)],
)  # a fixed length reads whatever there is
def test_a_failing_drafter_is_told_of_once_and_opened_anew(method: str, length: int | None) -> None:
    faults = Faults(method, 2)
    is_lazy = method == "draft_unread" and length is None
    engine = open_toy(add_package("flaky", lambda resources: Flaky(faults, is_lazy=is_lazy)))
    expected = answer(engine, TALE).tokens
    alone = Speculation(("flaky",), length)
    first, second, third = (answer(engine, TALE, alone) for _ in range(3))
    assert [each.tokens for each in (first, second, third)] == [expected] * 3
    assert first.notices == ("The drafter flaky failed and was left out: Something broke.",)
    assert second.notices == third.notices == ()
    assert faults.left == 0 and (faults.opened, faults.closed) == (3, 2)
    assert third.drafters == {"flaky"} and sum(step.n_accepted for step in third.steps) > 0
    engine.close()
    assert faults.closed == 3


@pytest.mark.parametrize("length", [FIXED, ADAPTIVE])
def test_the_others_draft_on_when_one_fails(length: int | None) -> None:
    engine = open_toy(add_package("flaky", lambda resources: Flaky(Faults("expand", 1000), is_free=True)))
    expected = answer(engine, TALE).tokens
    speculation = Speculation(("flaky", "ngram", "model"), length)
    found = [answer(engine, TALE, speculation) for _ in range(2)]
    assert [each.tokens for each in found] == [expected] * 2
    assert len(found[0].notices) == 1 and not found[1].notices
    for each in found:
        assert each.drafters and "flaky" not in each.drafters
        assert not any(ord("?") in step.tokens for step in each.steps), "what the failed unit had added is taken back"
    engine.close()


@pytest.mark.parametrize("length", [FIXED, ADAPTIVE])
def test_a_token_that_does_not_exist_is_a_failure(length: int | None) -> None:
    class Stranger(Drafter):
        name = "stranger"
        is_free = True

        def expand(self, tree: DraftTree, text: Sequence[int], limit: Budget) -> Iterator[None]:
            tree.add(-1, 257, self.name, 0.99)
            yield

    engine = open_toy(add_package("stranger", lambda resources: Stranger()))
    expected = answer(engine, TALE).tokens
    found = answer(engine, TALE, Speculation(("stranger", "ngram"), length))
    assert found.tokens == expected and found.drafters == {"ngram"}
    (notice,) = found.notices
    assert notice.startswith("The drafter stranger failed and was left out: ") and "token 257" in notice
    engine.close()


@pytest.mark.parametrize(
    "error", [ValueError("no table."), OSError("no file"), InvalidRequest("no luck.", hint="None.")], ids=str
)
def test_a_drafter_that_cannot_be_opened_is_left_out(error: Exception) -> None:
    tried = 0

    def refuse(resources: SlotResources) -> Drafter:
        nonlocal tried
        tried += 1
        raise error

    engine = open_toy(add_package("refusing", refuse))
    engine.speculation = Speculation(("refusing", "ngram", "model"), FIXED)
    first, second = answer(engine, TALE), answer(engine, TALE)
    reason = (error.message if isinstance(error, EdgespecError) else str(error)).rstrip(".")
    assert first.notices == (f"The drafter refusing cannot be used: {reason}.",)
    assert second.notices == () and tried == 1
    assert first.tokens == second.tokens == answer(engine, TALE, PLAIN).tokens
    assert first.drafters and "refusing" not in first.drafters
    alone = answer(engine, TALE, Speculation(("refusing",), FIXED))
    assert alone.tokens == first.tokens and alone.drafters == set(), "plain decoding is left"
    engine.close()


def test_an_error_of_the_target_is_no_failure_of_a_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither is a cancelled draft."""
    engine = open_toy(add_package("flaky", lambda resources: Flaky(Faults("none", 0))))
    engine.speculation = Speculation(("flaky", "ngram", "model"), FIXED)
    expected = answer(engine, TALE)

    def break_down(*_: object, **__: object) -> None:
        raise BackendError("broken.", hint="None.")

    (slot,) = engine._slots._kept
    monkeypatch.setattr(slot.target, "forward", break_down)
    with pytest.raises(BackendError, match="broken"):
        answer(engine, TALE)
    assert not engine._slots._kept
    for calls in range(1, 40, 7):
        *_, last = engine.stream(TALE, Alarm(calls))
        assert isinstance(last, Finished)
    again = answer(engine, TALE)
    assert again.tokens == expected.tokens and again.notices == () and again.drafters == expected.drafters
    engine.close()


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Lookups, a draft model and a self-draft, in the mode whose results do not depend on the number of rows."""
    options = LoadOptions(threads=1, context_size=512, exact=True)
    target, draft = (
        open_model("llamacpp", path, options, progress=lambda f: None, check=lambda: None) for path in (TARGET, DRAFT)
    )
    method = parse("layerskip:2")
    assert method is not None
    folder = tmp_path_factory.mktemp("drafts")
    attached = target.attach(method, folder=folder, progress=lambda f: None, check=lambda: None)
    opened = Engine(target, list_loaded(model=draft, self=attached), PLAIN)
    yield opened
    opened.close()


def cheap(*names: str) -> DraftStats:
    stats = DraftStats(Profile({1: 1.0, 16: 1.1}, dict.fromkeys(names, DraftCost({1: 0.01}))))
    stats.costs = Cheap(stats.costs.profile)
    return stats


THREE = ("ngram", "model", "self")
TOGETHER = {
    "chain": Speculation(THREE, 3),
    "tree": Speculation(THREE, 3, 9),
    "other order": Speculation(THREE[::-1], 2, 7),
    "autopilot": Speculation(THREE),
}


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=0.8, top_p=0.95)], ids=["greedy", "drawn"])
@pytest.mark.parametrize("way", TOGETHER)
def test_several_together_give_plain_decodings_text(trio: Engine, way: str, sampling: SamplingParams) -> None:
    trio.draft_stats = cheap("model", "self")
    drafters: set[str] = set()
    origins: set[str] = set()
    accepted = 0
    for seed, prompt in enumerate(CODE[:5]):
        request = Request(prompt, sampling, max_tokens=40, seed=seed)
        expected = answer(trio, request, PLAIN).tokens
        found = answer(trio, request, TOGETHER[way])
        assert found.tokens == expected and found.notices == ()
        accepted += sum(step.n_accepted for step in found.steps)
        drafters |= found.drafters
        origins |= found.origins
    assert accepted > 20
    if way == "chain":
        assert drafters == {"ngram", "model"}, "the first that proposes anything"
        return
    assert drafters == set(THREE)
    assert any("+" in origin for origin in origins), "tokens that several have proposed"
    assert {name for origin in origins for name in origin.split("+")} <= set(THREE)


def test_tokens_are_drawn_by_those_who_can(trio: Engine) -> None:
    """Without a seed, drafted tokens are drawn by the first drafter that can; lookups are verified by matching."""
    trio.draft_stats = cheap("model", "self")
    request = Request(CODE[0], SamplingParams(temperature=1.0), max_tokens=40)
    for speculation in (Speculation(("ngram", "model"), 3), Speculation(THREE[::-1], 3), Speculation(THREE)):
        found = [answer(trio, request, speculation) for _ in range(3)]
        assert sum(step.n_accepted for each in found for step in each.steps) > 0
        assert not any(each.notices for each in found)


def test_branches_of_several_lookups_where_the_target_takes_chains(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("models") / "hybrid.gguf"
    hybrid(path)
    options = LoadOptions(threads=1, context_size=256)
    target = open_model("llamacpp", path, options, progress=lambda f: None, check=lambda: None)

    class Contrary(Drafter):
        """Proposes other tokens than lookups do, and siblings of them."""

        name = "contrary"
        is_free = True

        def expand(self, tree: DraftTree, text: Sequence[int], limit: Budget) -> Iterator[None]:
            for token in range(5, 9):
                tree.add(tree.add(-1, token, self.name, 0.9), text[-1], self.name, 0.9)
            yield

    package = add_package("contrary", lambda resources: Contrary())
    engine = Engine(target, [*list_loaded(), package], PLAIN)
    engine.draft_stats = cheap()
    request = Request(CODE[0] + CODE[0], GREEDY, max_tokens=30)
    expected = answer(engine, request).tokens
    for speculation in (Speculation(("contrary", "ngram")), Speculation(("contrary", "ngram"), 3, 9)):
        found = answer(engine, request, speculation)
        assert found.tokens == expected and sum(step.n_drafted for step in found.steps) > 0
    engine.close()


def test_a_request_may_ask_for_fewer_drafters() -> None:
    engine = open_toy()
    engine.speculation = Speculation(("ngram", "model"), 3, 9)
    expected = answer(engine, TALE, PLAIN)
    assert expected.drafters == set()
    requests = {
        ("ngram",): Speculation(("ngram",), 4),
        ("model",): Speculation(("model",), 4),
        ("ngram", "model"): None,
    }
    for names, speculation in requests.items():
        found = answer(engine, TALE, speculation)
        assert found.tokens == expected.tokens and found.drafters == set(names)
    assert answer(engine, TALE, Speculation(("ngram",))).drafters == {"ngram"}
    assert engine.speculation == Speculation(("ngram", "model"), 3, 9)
    assert len(engine._slots._kept) == 1, "one cache has served all"
    engine.close()


@pytest.mark.parametrize("name", ["model", "self", "nonsense"])
@pytest.mark.parametrize("length", [FIXED, ADAPTIVE])
def test_a_drafter_that_is_not_loaded_is_refused(name: str, length: int | None) -> None:
    engine = Engine(load("tree", LoadOptions()), [], PLAIN)
    engine.draft_stats = cheap()
    expected = answer(engine, TALE)
    with pytest.raises(DraftRefused, match=f"the drafter '{name}' is not loaded") as caught:
        answer(engine, TALE, Speculation(("ngram", name), length))
    assert caught.value.hint
    assert answer(engine, TALE).tokens == expected.tokens
    assert answer(engine, TALE, Speculation((name,), 0)).tokens == expected.tokens, "nobody has to draft"
    engine.close()


def test_lookups_need_not_be_loaded() -> None:
    engine = Engine(load("tree", LoadOptions()), [], PLAIN)
    expected = answer(engine, TALE).tokens
    found = answer(engine, TALE, Speculation(("ngram",), 4))
    assert found.tokens == expected and found.drafters == {"ngram"}
    engine.close()


def test_what_is_measured() -> None:
    """Those that take time and work; what was known is kept when a drafter joins."""
    broken, working = Faults("expand", 1000), Faults("none", 0)
    packages = [
        add_package("broken", lambda resources: Flaky(broken, "broken")),
        add_package("working", lambda resources: Flaky(working, "working")),
    ]
    engine = open_toy(*packages)
    profile = engine.measure(0.05)
    assert set(profile.drafts) == {"model", "working"} and 1 in profile.rows
    assert all(cost.seconds(1) > 0 and cost.read_s >= 0 for cost in profile.drafts.values())
    known = DraftCost({1: 123.0}, 4.0)
    engine.draft_stats = DraftStats(replace(profile, drafts={"working": known}))
    with pytest.raises(Cancelled):
        engine.measure_missing(Alarm(1))
    assert set(engine.draft_stats.costs.profile.drafts) == {"working"}
    engine.measure_missing()
    found = engine.draft_stats.costs.profile
    assert set(found.drafts) == {"model", "working"} and found.drafts["working"] == known
    assert found.rows == profile.rows and 0 < found.drafts["model"].seconds(1) < 100
    assert generate(engine, TALE)[1].tokens == answer(engine, TALE, Speculation(("model",), 3)).tokens
    engine.close()


def test_an_autopilot_without_the_price_of_a_drafter_does_not_ask_it() -> None:
    engine = open_toy()
    engine.draft_stats = cheap()
    found = answer(engine, TALE, Speculation(("ngram", "model")))
    assert found.drafters == {"ngram"} and found.tokens == answer(engine, TALE, PLAIN).tokens
    engine.measure_missing()
    assert engine.draft_stats.costs.has_cost("model")
    engine.close()
