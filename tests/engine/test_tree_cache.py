"""A text that is alone among several slots drafts in trees; beside others it goes on in chains, and nothing is lost."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from edgespec.autopilot.speculation import Speculation
from edgespec.backends import open_model
from edgespec.backends.llamacpp import tree_cache
from edgespec.backends.llamacpp.model import LlamaModel
from edgespec.backends.options import LoadOptions
from edgespec.bench.divergence import first_divergence
from edgespec.cancel import iterate
from edgespec.core.protocols import PrefillProgress, Step
from edgespec.core.sampling import SamplingParams
from edgespec.engine.engine import Engine
from edgespec.engine.events import Event, Request
from edgespec.errors import BackendError, Cancelled
from edgespec.formats.head_file import read_head
from tests.engine.conftest import PLAIN, list_loaded, open_engine
from tests.engine.prompts import CODE
from tests.engine.test_together import goes_on, together, tokens
from tests.gguf_models import find_trained
from tests.trained_heads import EAGLE3, convert

GREEDY = SamplingParams(temperature=0)
DEPTH, NODES = 3, 9
OPTIONS = LoadOptions(threads=1, context_size=512, caches=3, tree_cache=True)
LONG = Request(CODE[0], GREEDY, max_tokens=90)


@pytest.fixture(autouse=True)
def moves_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_cache, "_PAYBACK", 0.0)


@pytest.fixture
def shared() -> Iterator[Engine]:
    opened = open_engine(find_trained("target"), find_trained("draft"), OPTIONS)
    opened.speculation = Speculation(("model",), DEPTH, NODES)
    yield opened
    opened.close()


@pytest.fixture
def with_head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An EAGLE-3 head, which reads hidden states of the target wherever it is."""
    folder = tmp_path_factory.mktemp("head") / "eagle3"
    folder.symlink_to(EAGLE3)
    path, target = convert(folder), open_model("llamacpp", find_trained("target"), OPTIONS)
    spec = read_head(path)
    assert spec is not None
    made = Engine(target, list_loaded(eagle3=target.load_head(spec, path)), Speculation(("eagle3",), DEPTH, NODES), 3)
    yield made
    made.close()


def sizes(events: list[Event]) -> list[int]:
    """Drafted nodes of each round."""
    return [event.n_drafted for event in events if isinstance(event, Step) and event.index]


def reused(events: list[Event]) -> int:
    return max(event.reused for event in events if isinstance(event, PrefillProgress))


def check_plain(engine: Engine, request: Request, events: list[Event]) -> None:
    """The tokens are those of plain decoding but for near ties."""
    [expected] = together(engine, [request], PLAIN)
    session = engine.target.open_session()
    assert isinstance(request.prompt, str)
    fork = first_divergence(session, engine.encode(request.prompt), tokens(expected), tokens(events))
    assert fork is None or fork.is_near_tie, fork
    session.close()


@pytest.mark.parametrize("name", ["shared", "with_head"])
def test_trees_alone_and_chains_beside_others(name: str, request: pytest.FixtureRequest) -> None:
    engine: Engine = request.getfixturevalue(name)
    first: list[Event] = []
    second: list[Event] = []
    running = engine.generate(LONG)
    while len(sizes(first)) < 8:
        assert goes_on(first, running)
    assert max(sizes(first)) > DEPTH, "a tree"
    start = len(sizes(first))
    beside = engine.generate(Request(CODE[1], GREEDY, max_tokens=20))
    while goes_on(second, beside):
        assert goes_on(first, running)
    end = len(sizes(first))
    assert end > start + 4
    assert max(sizes(first)[start + 2 : end]) <= DEPTH, "chains"
    assert max(sizes(second)) <= DEPTH
    while goes_on(first, running):
        pass
    assert max(sizes(first)[end + 2 :]) > DEPTH, "alone again"
    check_plain(engine, LONG, first)
    check_plain(engine, Request(CODE[1], GREEDY, max_tokens=20), second)
    assert sum(event.n_accepted for event in first if isinstance(event, Step)) > 10


def test_what_a_cache_holds_is_read_once(shared: Engine) -> None:
    """The next turn, a text that begins alike, and one that comes while the first is under way."""
    [events] = together(shared, [LONG])
    prompt = shared.encode(CODE[0])
    [again] = together(shared, [LONG])
    assert reused(again) == len(prompt) and tokens(again) == tokens(events)
    other = Request(CODE[1], GREEDY, max_tokens=30)
    [_] = together(shared, [other])  # the first text moves out
    [third] = together(shared, [LONG])
    assert reused(third) == len(prompt) and tokens(third) == tokens(events)
    assert isinstance(LONG.prompt, str)
    beginning = LONG.prompt * 20  # more than is read sooner than copied
    together(shared, [Request(beginning, GREEDY, max_tokens=4)])
    longer = [Request(beginning + end, GREEDY, max_tokens=12) for end in ("\nclass A", "\ndef b", "\nx = 1")]
    n = len(shared.encode(beginning))
    assert [reused(each) >= n - 3 for each in together(shared, longer)] == [True] * 3


def test_a_cancelled_text_leaves_the_cache_usable(shared: Engine) -> None:
    is_gone = False

    def check() -> None:
        if is_gone:
            raise Cancelled

    events: list[Event] = []
    running = iterate(shared.generate(LONG), check)
    while len(sizes(events)) < 5:
        assert goes_on(events, running)
    is_gone = True
    while goes_on(events, running):
        pass
    [whole] = together(shared, [LONG])
    check_plain(shared, LONG, whole)
    shared.release_slots()
    [anew] = together(shared, [LONG])
    assert tokens(anew) == tokens(whole) and max(sizes(anew)) > DEPTH


def test_a_prompt_that_is_read_alone_makes_way_for_another_text(shared: Engine) -> None:
    """It moves between two parts of the prompt, and the other does not wait for the whole of it."""
    assert isinstance(LONG.prompt, str)
    long, short = Request(LONG.prompt * 24, GREEDY, max_tokens=60), Request(CODE[1], GREEDY, max_tokens=8)
    first: list[Event] = []
    second: list[Event] = []
    running = {0: (first, shared.generate(long))}
    assert goes_on(*running[0])
    running[1] = second, shared.generate(short)
    while running:
        running = {who: each for who, each in running.items() if goes_on(*each)}
    for request, events in ((long, first), (short, second)):
        check_plain(shared, request, events)
    assert max(sizes(second)) <= DEPTH


def test_a_broken_context_is_freed_before_another_is_opened(shared: Engine) -> None:
    other = Request(CODE[1], GREEDY, max_tokens=30)
    together(shared, [LONG])
    model = shared.target
    assert isinstance(model, LlamaModel) and model._tree_cache is not None
    broken = model._tree_cache._cells
    assert broken is not None
    together(shared, [LONG, other])  # both are at home now
    broken.context.native.is_broken = True
    [events] = together(shared, [other])
    assert not broken.context.native.handle, "it is freed"
    assert max(sizes(events)) > DEPTH, "and another one is used"
    check_plain(shared, other, events)


def test_another_draft_may_need_the_cache(shared: Engine) -> None:
    """As /draft changes it: sessions that are opened later have it, or have it no more."""
    model = shared.target
    assert isinstance(model, LlamaModel)
    shared.release_slots()
    model.allow_tree_cache(allowed=False)
    [chains] = together(shared, [LONG])
    shared.release_slots()
    model.allow_tree_cache(allowed=True)
    [trees] = together(shared, [LONG])
    assert max(sizes(chains)) <= DEPTH < max(sizes(trees))


def test_without_memory_drafts_stay_chains(shared: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise BackendError("no memory")

    monkeypatch.setattr(shared.target, "_open_alone", refuse)
    [events] = together(shared, [LONG])
    assert 0 < max(sizes(events)) <= DEPTH
    check_plain(shared, LONG, events)


def test_a_text_that_ends_soon_does_not_move(shared: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """If that would cost a copy: a new text begins there, and the next one would have it moved out."""
    monkeypatch.setattr(tree_cache, "_PAYBACK", 1e6)
    [first] = together(shared, [LONG])
    [second] = together(shared, [Request(CODE[1], GREEDY, max_tokens=30)])
    assert max(sizes(first)) > DEPTH >= max(sizes(second)) > 0
