"""The model drafter on toy sessions: in step with the target after any verdict, within budget, one prefill."""

from __future__ import annotations

import copy
from collections.abc import Generator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.backends.toy.session import RecurrentToySession, ToyModel, ToyScores, ToySession
from edgespec.controller.fixed import FixedLength
from edgespec.core.loop import speculate
from edgespec.core.protocols import NO_DRAFT, Budget, CheckCancelled, Draft, PrefillProgress, Session, Step, Verdict
from edgespec.core.rng import CounterRng, index_at
from edgespec.core.sampling import Sampler, SamplingParams
from edgespec.core.scores import Scores
from edgespec.core.tree import check_draft, depths, path_to
from edgespec.core.verify import SampleMatching
from edgespec.drafters.draft_model import GreedyChoice, ModelDrafter, SampledChoice
from edgespec.errors import Cancelled

V = 8
MODEL = ToyModel(seed=5, vocab_size=V, order=3, sharpness=1.5)
SCORES = ToyScores(MODEL, ((0,),))
PARAMS = SamplingParams(temperature=0.9, top_k=6, presence_penalty=0.4, penalty_window=6)


def open_session(kind: str, model: ToyModel = MODEL, context_size: int = 256) -> ToySession:
    make = RecurrentToySession if kind == "recurrent" else ToySession
    return make(model, context_size=context_size)


def choice_for(name: str, rng: np.random.Generator) -> GreedyChoice | SampledChoice:
    return GreedyChoice() if name == "greedy" else SampledChoice(Sampler(PARAMS, V), rng)


def same(a: Draft, b: Draft) -> bool:
    distributions = (a.q is None and b.q is None) or np.array_equal(a.q, b.q)
    return a.tokens.tolist() == b.tokens.tolist() and a.parents.tolist() == b.parents.tolist() and distributions


@given(data=st.data())
@pytest.mark.parametrize("choice", ["greedy", "sampled"])
@pytest.mark.parametrize("kind", ["linear", "recurrent"])
@settings(max_examples=60, deadline=None)
def test_in_step_after_any_verdict(kind: str, choice: str, data: st.DataObject) -> None:
    """After any part of any draft was accepted, the next draft is that of a fresh drafter."""
    token = st.integers(0, V - 1)
    history = data.draw(st.lists(token, min_size=1, max_size=6))
    context_size = data.draw(st.sampled_from([12, 20, 256]))
    rng = np.random.default_rng(0)
    drafter = ModelDrafter(open_session(kind, context_size=context_size), V, choice_for(choice, rng))
    drafter.begin(history, SCORES)
    history.append(data.draw(token))
    for _ in range(data.draw(st.integers(1, 6))):
        budget = Budget(data.draw(st.integers(1, 5)), data.draw(st.integers(1, 9)))
        if data.draw(st.booleans()):
            fresh_rng = copy.deepcopy(rng)
            draft = drafter.propose(history, budget)
            fresh = ModelDrafter(open_session("linear", context_size=context_size), V, choice_for(choice, fresh_rng))
            fresh.begin(history[:-1], SCORES)
            assert same(draft, fresh.propose(history, budget))
        else:
            draft = NO_DRAFT  # a step for which the loop asked for no draft
        path = path_to(draft, data.draw(st.integers(-1, len(draft) - 1)))
        verdict = Verdict(path, data.draw(token))
        drafter.observe(verdict, SCORES)
        history += [*draft.tokens[list(path)].tolist(), verdict.next_token]


@pytest.mark.parametrize("kind", ["linear", "recurrent"])
def test_after_a_rejection_the_text_so_far_is_still_cached(kind: str) -> None:
    session = open_session(kind)
    drafter = ModelDrafter(session, V, GreedyChoice())
    history = [1, 2, 3, 4]
    drafter.begin(history, SCORES)
    for token in (5, 6, 7):
        history.append(token)
        drafter.propose(history, Budget(4, 4))
        drafter.observe(Verdict((), 0), SCORES)
        assert session.position == len(history)


def naive_greedy(history: list[int], budget: Budget) -> list[tuple[int, ...]]:
    """Token paths: the greedy path, then the most probable siblings."""
    depth = min(budget.depth, budget.nodes)
    spine: list[int] = []
    beside: list[tuple[float, int, int, tuple[int, ...]]] = []
    mass = 1.0
    for d in range(depth):
        z = MODEL.logits([*history, *spine]).astype(float)
        p = np.exp(z - z.max()) / np.exp(z - z.max()).sum()
        best = int(z.argmax())
        beside += [(-mass * p[x], d, x, (*spine, x)) for x in range(V) if x != best]
        mass *= p[best]
        spine.append(best)
    spare = max(0, budget.nodes - budget.depth)
    return [tuple(spine[: i + 1]) for i in range(depth)] + [path for *_, path in sorted(beside)[:spare]]


@given(st.lists(st.integers(0, V - 1), min_size=2, max_size=12), st.integers(1, 5), st.integers(1, 12))
@settings(deadline=None)
def test_greedy_trees_take_the_most_probable_paths(history: list[int], depth: int, nodes: int) -> None:
    drafter = ModelDrafter(open_session("linear"), V, GreedyChoice())
    drafter.begin(history[:-1], SCORES)
    budget = Budget(depth, nodes)
    draft = drafter.propose(history, budget)
    check_draft(draft, V)
    found = [tuple(draft.tokens[list(path_to(draft, i))].tolist()) for i in range(len(draft))]
    assert found == naive_greedy(history, budget)
    assert len(draft) <= nodes
    assert depths(draft).max() == min(depth, nodes)


@given(st.lists(st.integers(0, V - 1), min_size=2, max_size=12), st.integers(0, 2**32), st.integers(1, 5))
@settings(deadline=None)
def test_sampled_drafts_carry_their_distribution(history: list[int], seed: int, depth: int) -> None:
    drafter = ModelDrafter(open_session("linear"), V, choice_for("sampled", np.random.default_rng(seed)))
    drafter.begin(history[:-1], SCORES)
    draft = drafter.propose(history, Budget(depth, depth + 3))
    assert draft.is_chain
    assert len(draft) == depth
    assert draft.q is not None
    rng, sampler, text = np.random.default_rng(seed), Sampler(PARAMS, V), list(history)
    for token, q in zip(draft.tokens.tolist(), draft.q, strict=True):
        distribution = sampler.distribution(MODEL.logits(text), text)
        assert q.tolist() == distribution.dense(V).tolist()
        assert token == distribution.token(index_at(distribution.weights, rng.random()))
        text.append(token)


class CountingSession(ToySession):
    """Notes what was run; takes at most `most` draft tokens in a forward."""

    def __init__(self, most: int = 256, context_size: int = 256, check: CheckCancelled = lambda: None) -> None:
        super().__init__(MODEL, context_size=context_size, chunk=4, check=check)
        self._most = most
        self.prefills: list[list[int]] = []
        self.rows: list[int] = []

    @property
    def draft_limit(self) -> int:
        return min(self._most, super().draft_limit)

    def prefill(self, tokens: Sequence[int]) -> Generator[PrefillProgress, None, Scores]:
        self.prefills.append([])
        events = super().prefill(tokens)
        while True:
            try:
                event = next(events)
            except StopIteration as end:
                scores: Scores = end.value
                return scores
            self.prefills[-1].append(event.done)
            yield event

    def forward(self, root: int, draft: Draft, *, run_ahead: bool = False) -> Scores:
        assert len(draft) <= self.draft_limit
        self.rows.append(1 + len(draft))
        return super().forward(root, draft, run_ahead=run_ahead)


def generate(session: Session, drafter: ModelDrafter, prompt: Sequence[int], depth: int, n: int) -> list[Step]:
    verifier = SampleMatching(Sampler(SamplingParams(temperature=0), V), CounterRng(0))
    controller = FixedLength(drafter, Budget(depth, depth))
    events = speculate(session, controller, verifier, prompt, max_tokens=n, stop=frozenset())
    return [event for event in events if isinstance(event, Step)]


def text_of(steps: list[Step]) -> list[int]:
    return [token for step in steps for token in step.tokens]


PROMPT = [1, 2, 3, 4, 5, 6, 7, 0, 1, 2]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_prompt_is_run_once_and_a_drafted_token_costs_a_forward(depth: int) -> None:
    session, target = CountingSession(), ToySession(MODEL)
    drafter = ModelDrafter(session, V, GreedyChoice())
    steps = generate(target, drafter, PROMPT, depth, 16)
    assert all(step.n_accepted == step.n_drafted for step in steps), "the draft is the target"
    assert session.prefills == [[4, 8, 10]]
    assert len(session.rows) == sum(step.n_drafted for step in steps)
    assert sum(session.rows) <= 15, "no token of the text is run twice"
    assert text_of(generate(target, drafter, PROMPT, depth, 16)) == text_of(steps)
    assert session.prefills == [[4, 8, 10], [10]], "the next turn reuses the cache"


def test_a_forward_too_narrow_to_catch_up_falls_back_on_prefill() -> None:
    session = CountingSession(most=1)
    drafter = ModelDrafter(session, V, GreedyChoice())
    drafter.begin(PROMPT, SCORES)
    history = [*PROMPT, 3, 1, 4, 1, 5]
    fresh = ModelDrafter(ToySession(MODEL), V, GreedyChoice())
    fresh.begin(history[:-1], SCORES)
    assert same(drafter.propose(history, Budget(3, 3)), fresh.propose(history, Budget(3, 3)))
    assert session.prefills == [[4, 8, 10], [14]]


@pytest.mark.parametrize("context_size", [1, 5, 10, 11, 12, 13, 16])
@pytest.mark.parametrize("depth", [1, 3])
def test_a_draft_context_smaller_than_the_targets(context_size: int, depth: int) -> None:
    session = CountingSession(context_size=context_size)
    steps = generate(ToySession(MODEL), ModelDrafter(session, V, GreedyChoice()), PROMPT, depth, 12)
    assert text_of(steps) == text_of(generate(ToySession(MODEL), no_drafter(), PROMPT, 0, 12))
    drafted_to = sum(step.n_drafted > 0 for step in steps)
    assert (drafted_to > 0) == (context_size > len(PROMPT)), "it drafts while the text fits, and only then"


def no_drafter() -> ModelDrafter:
    return ModelDrafter(ToySession(MODEL, context_size=1), V, GreedyChoice())


@pytest.mark.parametrize("target_vocab", [6, 8, 11])
@pytest.mark.parametrize("choice", ["greedy", "sampled"])
def test_other_numbers_of_padding_ids(target_vocab: int, choice: str) -> None:
    """The draft proposes ids that both models have, with distributions over the target's vocabulary."""
    sampler = Sampler(SamplingParams(), target_vocab)
    made = GreedyChoice() if choice == "greedy" else SampledChoice(sampler, np.random.default_rng(0))
    drafter = ModelDrafter(ToySession(MODEL), target_vocab, made)
    seen = set()
    for first in range(6):
        history = [first, 1, 2, 3]
        drafter.begin(history[:-1], SCORES)
        draft = drafter.propose(history, Budget(4, 7))
        check_draft(draft, target_vocab)
        seen |= set(draft.tokens.tolist())
        if draft.q is not None:
            np.testing.assert_allclose(draft.q.sum(1), 1)
            assert not draft.q[:, V:].any()
    assert max(seen) < min(V, target_vocab)


@pytest.mark.parametrize("calls", range(1, 14))
def test_cancelled_while_drafting_and_used_again(calls: int) -> None:
    left = calls

    def check() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise Cancelled

    session, target = CountingSession(check=check), ToySession(MODEL)
    drafter = ModelDrafter(session, V, GreedyChoice())
    with pytest.raises(Cancelled):
        generate(target, drafter, PROMPT, 3, 16)
    steps = generate(target, drafter, PROMPT, 3, 16)
    assert text_of(steps) == text_of(generate(ToySession(MODEL), no_drafter(), PROMPT, 0, 16))
    assert all(step.n_accepted == step.n_drafted for step in steps), "and it drafts as well as before"


def test_text_with_ids_that_the_draft_lacks_is_decoded_plainly() -> None:
    """A draft vocabulary may be shorter by padding ids; a template can still put one of them into the prompt."""
    target = ToyModel(seed=1, vocab_size=11)
    drafter = ModelDrafter(ToySession(ToyModel(seed=2, vocab_size=8)), 11, GreedyChoice())
    for prompt in ([1, 2], [1, 9, 2], [3, 4]):
        steps = generate(ToySession(target), drafter, prompt, depth=2, n=60)
        assert text_of(steps) == text_of(generate(ToySession(target), no_drafter(), prompt, depth=0, n=60))
