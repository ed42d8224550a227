"""Lookahead decoding against its pool and window written out, and its texts against plain decoding's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.autopilot.cost_model import CostModel
from edgespec.autopilot.fixed import FixedLength
from edgespec.autopilot.profile import Profile
from edgespec.autopilot.speculation import Speculation
from edgespec.autopilot.stats import DraftStats
from edgespec.backends import open_model
from edgespec.backends.options import LoadOptions
from edgespec.backends.toy import LetterModel, ToyRuntimeModel
from edgespec.backends.toy_session import Kind, ToySession
from edgespec.core.arrays import Logits
from edgespec.core.decoding import read_prompt
from edgespec.core.draft_tree import DraftTree
from edgespec.core.drafter import Outcome
from edgespec.core.loop import speculate
from edgespec.core.protocols import NO_DRAFT, Budget, Draft, Round, Session, Step
from edgespec.core.rng import CounterRng
from edgespec.core.sampling import Sampler, SamplingParams
from edgespec.core.scores import HostScores
from edgespec.core.tree import path_to
from edgespec.core.verify import SampleMatching
from edgespec.drafters.lookahead import LookaheadDrafter, NgramPool, WindowShape, parse_shape
from edgespec.drafters.registry import SlotResources, drafter_specs
from edgespec.engine.drafting import score_whole
from edgespec.engine.engine import Engine
from edgespec.engine.events import Request
from edgespec.engine.loaded_drafter import LoadedDrafter
from edgespec.errors import InvalidRequest
from edgespec.models.draft_words import parse_draft
from edgespec.models.drafts import DrafterPlan
from tests.core.toys import KINDS, Remembering, decode, open_session
from tests.gguf_models import TARGET

V = 6
MODEL = Remembering(seed=5, vocab_size=V, order=12, sharpness=1.5)
TOKEN = st.integers(0, V - 1)
TEXTS = st.lists(TOKEN, min_size=1, max_size=16)
SHAPES = st.builds(WindowShape, st.integers(1, 4), st.integers(2, 4), st.integers(1, 3))
SMALL = WindowShape(2, 3, 2)
Paths = set[tuple[int, ...]]


class DeviceScores(HostScores):
    """Scores whose rows the host has not read."""

    def host_logits(self, row: int) -> Logits | None:
        return None

    def logits(self, row: int) -> Logits:
        raise AssertionError("it copies rows from the device")


class Naive:
    """Every n-gram that was ever seen, the oldest first, and the columns of the window."""

    def __init__(self, shape: WindowShape, text: Sequence[int]) -> None:
        self.shape = shape
        width, size = shape.columns, shape.gram - 1
        self.grams = list_grams(text, shape.gram)
        self.columns = [[text[-1 - (i + place * width) % len(text)] for place in range(size)] for i in range(width)]

    def find(self, root: int) -> list[tuple[int, ...]]:
        latest = dict.fromkeys(gram[1:] for gram in reversed(self.grams) if gram[0] == root)
        return [*latest][: self.shape.branches]

    def list_columns(self) -> list[tuple[int, ...]]:
        """[W] each column's path from the root's child on."""
        chain = [column[0] for column in self.columns]
        return [(*chain[1 : i + 1], *column[1:]) for i, column in enumerate(self.columns)]

    def list_paths(self, root: int) -> Paths:
        whole = [*self.find(root), *self.list_columns()]
        return {path[:n] for path in whole for n in range(1, len(path) + 1)}

    def move(self, text: Sequence[int]) -> None:
        """`text` ends with the root of the round."""
        best = [int(MODEL.logits([*text, *path]).argmax()) for path in self.list_columns()]
        self.columns[0][0] = text[-1]
        for column, token in zip(self.columns, best, strict=True):
            self.grams.append((*column, token))
        self.columns = [[*column[1:], token] for column, token in zip(self.columns, best, strict=True)]


def list_grams(text: Sequence[int], size: int) -> list[tuple[int, ...]]:
    return [tuple(text[i : i + size]) for i in range(len(text) - size + 1)]


def expand(drafter: LookaheadDrafter, text: Sequence[int], limit: Budget) -> DraftTree:
    tree = DraftTree()
    for _ in drafter.expand(tree, text, limit):
        pass
    assert all(limit.depth >= depth for depth in tree.depths)
    return tree


def list_paths(tree: DraftTree) -> Paths:
    return {tuple(tree.path_tokens(node)) for node in range(len(tree))}


def whole(shape: WindowShape) -> Budget:
    """Room for all that it drafts, and branches even where a chain would do."""
    return Budget(shape.depth, max(shape.nodes, shape.depth + 1))


def play(
    session: Session, drafter: LookaheadDrafter, text: list[int], draft: Draft, node: int, next_token: int
) -> list[Outcome]:
    """The round in which the path to `node` is accepted, and `next_token` emitted after it."""
    scores = session.forward(text[-1], draft)
    path = path_to(draft, node)
    emitted = (*draft.tokens[list(path)].tolist(), next_token)
    text += emitted
    outcomes = drafter.observe(Round(text, emitted, draft, path, len(path), scores))
    session.commit(path)
    return [*outcomes]


@given(st.lists(st.tuples(TOKEN, TOKEN, TOKEN)), st.integers(1, 4))
def test_the_pool_keeps_the_last_ngrams_of_each_token(grams: list[tuple[int, ...]], most: int) -> None:
    pool = NgramPool(most)
    for gram in grams:
        pool.add(gram)
    for first in range(V):
        latest = dict.fromkeys(gram[1:] for gram in reversed(grams) if gram[0] == first)
        assert pool.find(first) == [*latest][:most]


@settings(deadline=None)
@given(data=st.data(), shape=SHAPES, text=TEXTS)
def test_the_window_moves_as_if_written_out(data: st.DataObject, shape: WindowShape, text: list[int]) -> None:
    """After any verdict the next draft has the last n-grams of the pool, and the columns one place further."""
    drafter, naive, session = LookaheadDrafter(shape), Naive(shape, text), ToySession(MODEL)
    read_prompt(session, text)
    drafter.begin(text, None)
    text = [*text, data.draw(TOKEN)]
    naive.grams = list_grams(text, shape.gram)
    for _ in range(data.draw(st.integers(1, 5))):
        tree = expand(drafter, text, whole(shape))
        assert list_paths(tree) == naive.list_paths(text[-1])
        assert len(tree) <= shape.nodes and max(tree.depths, default=0) <= shape.depth
        naive.move(text)
        n = len(text)
        node = data.draw(st.integers(-1, len(tree) - 1))
        play(session, drafter, text, tree.select(range(len(tree))), node, data.draw(TOKEN))
        naive.grams += list_grams(text, shape.gram)[max(0, n - shape.gram + 1) :]


def test_the_draft_of_distinct_tokens_has_the_size_that_the_shape_says() -> None:
    shape = WindowShape(3, 4, 2)
    drafter = LookaheadDrafter(shape)
    drafter.begin([9, 20, 21, 22, 9, 23, 24, 25, *range(10)], None)
    tree = expand(drafter, [9, 20, 21, 22, 9, 23, 24, 25, *range(10)], whole(shape))
    assert (len(tree), max(tree.depths)) == (shape.nodes, shape.depth) == (2 + 3 * 2 + 2 * 3, 4)
    assert drafter.whole_size == Budget(shape.depth, shape.nodes)
    assert WindowShape().nodes == 55 and WindowShape().depth == 9, "the documents say so"


def open_moving() -> tuple[LookaheadDrafter, ToySession, list[int]]:
    """A drafter that has begun, its target, and the text."""
    drafter, session, text = LookaheadDrafter(SMALL), ToySession(MODEL), [0, 1, 2, 3, 1, 4]
    read_prompt(session, text[:-1])
    drafter.begin(text[:-1], None)
    return drafter, session, text


def get_window(drafter: LookaheadDrafter) -> list[tuple[int, ...]]:
    """Without the place of the root, which the round decides."""
    first, *others = drafter._columns
    return [tuple(first[1:]), *map(tuple, others)]


@pytest.mark.parametrize("missing", ["nothing", "a leaf", "the chain", "all", "scores"])
def test_only_a_window_that_was_scored_moves(missing: str) -> None:
    drafter, session, text = open_moving()
    before = get_window(drafter)
    tree = expand(drafter, text, whole(SMALL))
    (leaf,) = [n for n in range(len(tree)) if tree.path_tokens(n) == [before[1][0], before[1][1]]]
    kept = {
        "nothing": range(len(tree)),
        "a leaf": [node for node in range(len(tree)) if node != leaf],
        "the chain": [node for node in range(len(tree)) if tree.path_tokens(node)[0] != before[1][0]],
        "all": (),
        "scores": range(len(tree)),
    }[missing]
    draft = tree.select([*kept])
    scores = None if missing == "scores" else session.forward(text[-1], draft)
    drafter.observe(Round([*text, 5], (5,), draft, (), 1, scores))
    assert (get_window(drafter) != before) == (missing == "nothing")


def test_scores_on_a_device_are_not_copied() -> None:
    windows = []
    for kind in (HostScores, DeviceScores):
        drafter, session, text = open_moving()
        tree = expand(drafter, text, whole(SMALL))
        scores = session.forward(text[-1], draft := tree.select(range(len(tree))))
        rows = kind([scores.logits(row) for row in range(1 + len(draft))])
        drafter.observe(Round([*text, 5], (5,), draft, (), 1, rows))
        windows.append(get_window(drafter))
    assert windows[0] == windows[1]


@pytest.mark.parametrize(
    ("limit", "n_grams", "has_window"),
    [
        (Budget(4, 4), 1, False),  # a chain, as for a target that takes no trees
        (Budget(1, 1), 1, False),
        (Budget(2, 7), 2, True),
        (Budget(2, 5), 1, True),
        (Budget(2, 4), 0, True),
        (Budget(1, 7), 2, False),  # near the end of the text
        (Budget(9, 63), 2, True),
    ],
)
def test_what_there_is_room_for(limit: Budget, n_grams: int, has_window: bool) -> None:
    """The window whole or not at all, and of the pool the last n-grams."""
    drafter = LookaheadDrafter(SMALL)
    text = [7, 1, 2, 7, 3, 4, 5, 6, 7]
    drafter.begin(text[:-1], None)
    found = list_paths(expand(drafter, text, limit))
    grams = [(3, 4)[: limit.depth], (1, 2)[: limit.depth]]
    assert [gram in found for gram in grams] == [n_grams > 0, n_grams > 1]
    assert all(path in found for path in ((4,), (5,), (5, 3))) == has_window
    assert len(found) <= limit.nodes


def test_what_it_would_have_said_of_emitted_tokens() -> None:
    drafter = LookaheadDrafter(WindowShape(2, 4, 2))
    drafter.begin([1, 2, 3, 4, 1], None)
    text = [1, 2, 3, 4, 1, 2, 3, 5, 1, 2]
    found = drafter.observe(Round(text, (2, 3, 5, 1, 2), NO_DRAFT, (), 0, None))
    assert found == [Outcome(0.3, True), Outcome(0.6, True), Outcome(0.6, False), Outcome(0.3, True)]


def test_the_pool_stays_where_the_text_goes_on() -> None:
    drafter = LookaheadDrafter(SMALL)
    drafter.begin([1, 2, 3], None)
    expand(drafter, [1, 2, 3, 1], whole(SMALL))
    drafter._pool.add([1, 4, 5])  # of the window
    drafter.begin([1, 2, 3, 1, 0], None)
    assert (4, 5) in list_paths(expand(drafter, [1, 2, 3, 1, 0, 1], Budget(2, 7)))
    drafter.begin([1, 2, 4, 1, 0], None)
    found = list_paths(expand(drafter, [1, 2, 4, 1, 0, 1], Budget(2, 7)))
    assert (4, 5) not in found and {(0, 1), (2, 4)} < found, "another text"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", KINDS)
@given(shape=SHAPES, prompt=TEXTS, seed=st.integers(0, 9))
@settings(max_examples=40, deadline=None)
def test_the_text_is_plain_decodings(
    kind: Kind, temperature: float, shape: WindowShape, prompt: list[int], seed: int
) -> None:
    """Greedy, and with each seed; where the target takes chains alone the drafter gives it none but these."""
    session = open_session(kind, MODEL)
    sampler = Sampler(SamplingParams(temperature=temperature), V)
    budget = whole(shape) if kind == "tree" else Budget(shape.depth, shape.depth)
    controller = FixedLength([LookaheadDrafter(shape)], budget, V)
    verifier = SampleMatching(sampler, CounterRng(seed))
    events = speculate(session, controller, verifier, prompt, max_tokens=24, stop=frozenset({V - 1}))
    steps = [event for event in events if isinstance(event, Step)]
    assert not controller.failures
    found = [token for step in steps for token in step.tokens]
    assert found == decode(MODEL, sampler, seed, prompt, 24, frozenset({V - 1}), 256)


@pytest.fixture(scope="module")
def target() -> Iterator[Session]:
    options = LoadOptions(threads=1, context_size=512, exact=True)
    model = open_model("llamacpp", TARGET, options)
    with closing(model), closing(model.open_session()) as session:
        yield session


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("shape", [WindowShape(), WindowShape(3, 3, 4)], ids=str)
def test_the_text_of_a_trained_model_is_plain_decodings(
    target: Session, shape: WindowShape, temperature: float
) -> None:
    texts, size = [], target.capabilities.vocab_size
    drafter = LookaheadDrafter(shape)
    prompt = np.random.default_rng(3).integers(4, size, 24).tolist() * 2
    for drafters in ((), (drafter,)):
        controller = FixedLength(drafters, whole(shape), size)
        verifier = SampleMatching(Sampler(SamplingParams(temperature=temperature), size), CounterRng(5))
        events = speculate(target, controller, verifier, prompt, max_tokens=40, stop=frozenset())
        steps = [event for event in events if isinstance(event, Step)]
        texts.append([token for step in steps for token in step.tokens])
    assert texts[0] == texts[1] and sum(step.n_accepted for step in steps)
    guesses = {prompt[-1 - at % len(prompt)] for at in range(shape.columns * (shape.gram - 1))}
    assert not guesses >= {token for column in drafter._columns[1:] for token in column}, "the window has moved"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "lookahead takes three numbers, not ''."),
        ("7,5", "lookahead takes three numbers, not '7,5'."),
        ("7,5,7,1", "lookahead takes three numbers, not '7,5,7,1'."),
        ("a,5,7", "lookahead takes three numbers, not 'a,5,7'."),
        ("-1,5,7", "lookahead takes three numbers, not '-1,5,7'."),
        ("0,5,7", "W of lookahead must be at least 1, not 0."),
        ("7,1,7", "N of lookahead must be at least 2, not 1."),
        ("7,5,0", "G of lookahead must be at least 1, not 0."),
        ("15,5,15", "lookahead:15,5,15 drafts up to 119 tokens a round, and a draft has 63 at most."),
    ],
)
def test_what_is_refused_in_one_sentence(text: str, told: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_draft(f"ngram+lookahead:{text}")
    assert caught.value.message == told and caught.value.hint == "Write W,N,G as in lookahead:7,5,7."


def test_the_shape_that_the_user_names() -> None:
    assert parse_shape("4,3,2") == WindowShape(4, 3, 2) and str(WindowShape(4, 3, 2)) == "lookahead:4,3,2"
    for text, shape in (("lookahead", WindowShape()), ("lookahead:4,3,2", WindowShape(4, 3, 2))):
        (plan,) = parse_draft(text)
        drafter = plan.spec.open(SlotResources(open_session("tree", MODEL), V))
        assert drafter.name == plan.spec.name == plan.label == "lookahead"
        assert drafter.whole_size == Budget(shape.depth, shape.nodes)


@pytest.mark.parametrize(
    ("rows", "kind", "names", "is_whole"),
    [
        ({1: 1.0, 64: 1.1}, "tree", ["lookahead"], True),
        ({1: 1.0, 64: 1.2}, "tree", ["lookahead"], False),
        ({1: 1.0, 64: 1.1}, "linear", ["lookahead"], False),
        ({1: 1.0, 64: 1.1}, "tree", ["lookahead", "another"], False),
    ],
)
def test_it_is_scored_whole_where_its_rows_are_nearly_free(
    rows: dict[int, float], kind: Kind, names: list[str], is_whole: bool
) -> None:
    """Alone, and by a target that takes trees. Elsewhere the autopilot chooses among its n-grams."""
    spec = Speculation(tuple(names))
    drafters = [LookaheadDrafter() for _ in names]
    found = score_whole(spec, open_session(kind, MODEL), drafters, CostModel(Profile(rows)))
    assert found == (replace(spec, draft_max=9, draft_tree=55) if is_whole else spec)


def test_a_rule_for_drawn_chains_stays_one_where_the_draft_model_has_failed() -> None:
    spec = Speculation(("lookahead", "model"), acceptance="block")
    drafters = [LookaheadDrafter()]
    assert score_whole(spec, open_session("tree", MODEL), drafters, CostModel(Profile({1: 1.0, 64: 1.1}))) is spec


@pytest.mark.parametrize(("rows", "n_drafted"), [({1: 1.0, 64: 1.1}, 27), ({1: 1.0, 2: 2.0, 64: 64.0}, 4)])
def test_an_engine_scores_the_window_where_its_rows_are_nearly_free(rows: dict[int, float], n_drafted: int) -> None:
    target = ToyRuntimeModel("tree", LetterModel(order=8), LoadOptions(context_size=256))
    engine = Engine(target, [LoadedDrafter(DrafterPlan(drafter_specs()["lookahead"]))], Speculation(("lookahead",)))
    engine.draft_stats = DraftStats(Profile(rows))
    request = Request("one two three one two three one ", SamplingParams(temperature=0), max_tokens=40)
    steps = [event for event in engine.stream(request) if isinstance(event, Step)]
    longest = max(step.n_drafted for step in steps)
    assert longest >= n_drafted if n_drafted > 4 else longest <= n_drafted
    engine.close()
