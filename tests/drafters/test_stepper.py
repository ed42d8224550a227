"""DraftModelStepper on toy sessions: candidates follow the text, and few tokens are read twice."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.backends.toy.session import ToyModel, ToySession
from edgespec.core.arrays import Logits
from edgespec.core.rng import index_at
from edgespec.core.sampling import Sampler, SamplingParams
from edgespec.drafters.draft_model import Candidates, DraftModelStepper, DraftSampler, GreedyTopK, Sampled
from edgespec.errors import BackendError, Cancelled
from tests.core.stats import assert_follows
from tests.core.toys import KINDS, Alarm, open_session
from tests.drafters.test_draft_model import CountingSession

V = 8
MODEL = ToyModel(seed=5, vocab_size=V, order=3, sharpness=1.5)
PARAMS = SamplingParams(temperature=0.9, top_k=6, presence_penalty=0.4, penalty_window=6)
ALL = 10**6
TEXT = [1, 2, 3, 4, 5, 6, 7, 0, 1, 2]


def best_first(logits: Logits) -> Candidates:
    """The four best tokens that are at most e^4 times less probable than the best, with their probabilities."""
    p = np.exp(logits.astype(float)) / np.exp(logits.astype(float)).sum()
    order = sorted((i for i in range(len(p)) if p[i] >= p.max() * np.exp(-4.0)), key=lambda i: (-p[i], i))[:4]
    return Candidates(order, [float(p[i]) for i in order])


def resized(logits: Logits, vocab_size: int) -> Logits:
    lacking = np.full(max(0, vocab_size - len(logits)), -np.inf, np.float32)
    return np.concatenate([logits[:vocab_size], lacking])


def expected(
    choice: DraftSampler, text: Sequence[int], held: int, vocab_size: int = V, model: ToyModel = MODEL
) -> Candidates:
    """Candidates after `text`, of which the draft model got the last `held` tokens; draws from the same numbers."""
    logits = resized(model.logits(text[len(text) - held :]), vocab_size)
    if isinstance(choice, GreedyTopK):
        return best_first(logits)
    drawing = copy.deepcopy(choice)
    assert isinstance(drawing, Sampled)
    distribution = drawing._sampler.distribution(logits, text)
    token = distribution.token(index_at(distribution.weights, drawing._rng.random()))
    q = distribution.dense(vocab_size)
    return Candidates([token], [float(q[token])], q)


def check_same(found: Candidates | None, wanted: Candidates) -> None:
    assert found is not None
    assert found.tokens == wanted.tokens
    assert found.probabilities == pytest.approx(wanted.probabilities, rel=1e-5)
    assert (found.q is None) == (wanted.q is None)
    if found.q is not None and wanted.q is not None:
        assert found.q.tolist() == wanted.q.tolist()


def choice_named(name: str, vocab_size: int = V, seed: int = 0) -> DraftSampler:
    return GreedyTopK() if name == "best" else Sampled(Sampler(PARAMS, vocab_size), np.random.default_rng(seed))


@pytest.mark.parametrize("name", ["best", "drawn"])
@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_candidates_follow_the_text_after_any_verdict(kind: str, name: str, data: st.DataObject) -> None:
    """After any rounds, with or without drafts, candidates are those of the draft model on the text it has read."""
    token = st.integers(0, V - 1)
    size = data.draw(st.sampled_from([8, 12, 20, 256]))
    choice = choice_named(name)
    session = open_session(kind, MODEL, size)
    for _ in session.prefill(data.draw(st.lists(token, min_size=1, max_size=size))):  # an earlier generation
        pass
    stepper = DraftModelStepper(session, V, choice)
    text = data.draw(st.lists(token, min_size=1, max_size=12))
    begun, skipped = False, 0
    for _ in range(data.draw(st.integers(1, 7))):
        stepper.sync(text)
        drafted: list[int] = []
        if data.draw(st.booleans()):
            window = data.draw(st.sampled_from([1, 3, 6, ALL]))
            unread = len(text) - (skipped + session.position if begun else 0)
            assert stepper.lag(text) == unread
            if unread > min(window, size // 2) or len(text) - skipped > size:
                skipped = len(text) - min(window, size // 2, len(text))
            wanted = copy.deepcopy(choice)
            options = stepper.start(text, window)
            begun, held = True, session.position
            assert held == len(text) - skipped
            for n in range(data.draw(st.integers(0, 9)) + 1):
                if n:
                    wanted = copy.deepcopy(choice)
                    options = stepper.step(drafted[-1])
                if options is None:
                    assert session.position == size
                    break
                assert session.position == held + n <= size
                check_same(options, expected(wanted, [*text, *drafted], held + n))
                drafted.append(options.tokens[0])
        agreed = data.draw(st.integers(0, len(drafted)))
        text += [*drafted[:agreed], data.draw(token), *data.draw(st.lists(token, max_size=12 * (not drafted)))]


def test_the_best_tokens_in_order_of_their_probability() -> None:
    """Against figures by hand: ties go to the lower id, far less probable tokens are no candidates."""
    logits = np.log(np.array([0.2, 0.3, 0.001, 0.2, 0.299], np.float32))
    found = GreedyTopK().sample(logits, [])
    assert (found.tokens, found.q) == ([1, 4, 0, 3], None)
    assert found.probabilities == pytest.approx([0.3, 0.299, 0.2, 0.2], rel=1e-5)
    found = GreedyTopK().sample(np.array([-3.9, 0.0, -4.1, -np.inf], np.float32), [])
    assert found.tokens == [1, 0]
    assert found.probabilities == pytest.approx([0.9644926, 0.01952317], rel=1e-5)
    assert GreedyTopK().sample(np.tile(np.array([0, 1], np.float32), 500), []).tokens == [1, 3, 5, 7]


@pytest.mark.parametrize("choice", ["best", "drawn"])
@pytest.mark.parametrize("score", [np.nan, np.inf, -np.inf])
def test_scores_that_are_no_numbers_are_an_error(choice: str, score: float) -> None:
    logits = np.full(V, -np.inf, np.float32)
    logits[3] = score
    with pytest.raises(BackendError, match="NaN or infinite logits"):
        choice_named(choice).sample(logits, [1, 2])


def test_tokens_follow_the_law_they_carry() -> None:
    """The distribution is the sampler's after the text so far, penalties included; samples follow it."""
    sampler, text = Sampler(PARAMS, V), [1, 2, 3]
    distribution = sampler.distribution(MODEL.logits(text), text).dense(V)
    second = {i: sampler.distribution(MODEL.logits([*text, i]), [*text, i]).dense(V) for i in range(V)}
    counts, pairs = np.zeros(V, int), np.zeros((V, V), int)
    session, choice = ToySession(MODEL), choice_named("drawn", seed=11)
    for _ in range(1500):
        stepper = DraftModelStepper(session, V, choice)
        assert stepper.is_sampled
        first = stepper.start(text, ALL)
        assert first is not None and first.q is not None and first.q.tolist() == distribution.tolist()
        (token,) = first.tokens
        assert first.probabilities == [distribution[token]]
        following = stepper.step(token)
        assert following is not None and following.q is not None and following.q.tolist() == second[token].tolist()
        counts[token] += 1
        pairs[token, following.tokens[0]] += 1
    assert_follows(counts, distribution)
    for token in np.flatnonzero(counts > 150).tolist():
        assert_follows(pairs[token], second[token])


def started(stepper: DraftModelStepper, text: Sequence[int], window: int = ALL) -> Candidates:
    stepper.sync(text)
    options = stepper.start(text, window)
    assert options is not None
    return options


def test_the_text_is_read_once_and_a_drafted_token_costs_a_forward() -> None:
    session = CountingSession()
    stepper = DraftModelStepper(session, V, GreedyTopK())
    options = started(stepper, TEXT)
    assert session.prefills == [[4, 8, 9]]
    for _ in range(3):
        last = stepper.step(options.tokens[0])
        assert last is not None
        drafted, options = options.tokens[0], last
    assert session.rows == [1, 1, 1, 1]
    text = [*TEXT, 6, 6]  # something else was emitted
    assert drafted != 6 or options.tokens[0] != 6
    started(stepper, text)
    text += [5, 4, 3]
    started(stepper, text)
    assert session.rows == [1, 1, 1, 1, 2, 3]
    assert session.prefills == [[4, 8, 9]]


@pytest.mark.parametrize("kind", ["linear", "recurrent"])
def test_drafted_and_emitted_tokens_are_not_read_again(kind: str) -> None:
    session = open_session(kind, MODEL)
    stepper = DraftModelStepper(session, V, GreedyTopK())
    text, options = list(TEXT), started(stepper, TEXT)
    for _ in range(3):
        text.append(options.tokens[0])
        last = stepper.step(options.tokens[0])
        assert last is not None
        options = last
    for emitted, again in (([*text, 0], 1), (text, 1), ([*text[:-1], (text[-1] + 1) % V], 1)):
        copied = copy.deepcopy(stepper)
        copied.sync(emitted)
        assert copied.lag(emitted) == again if kind == "linear" else again <= copied.lag(emitted) <= 4
        options = copied.start(emitted, ALL)
        check_same(options, expected(GreedyTopK(), emitted, len(emitted)))


def test_more_unread_tokens_than_a_forward_takes_are_prefilled() -> None:
    session = CountingSession(most=1)
    stepper = DraftModelStepper(session, V, GreedyTopK())
    started(stepper, TEXT)
    text = [*TEXT, 3, 1, 4, 1, 5]
    check_same(started(stepper, text), expected(GreedyTopK(), text, len(text)))
    assert session.prefills == [[4, 8, 9], [14]], "and not the whole text again"


def test_the_next_generation_reuses_the_cache() -> None:
    session = CountingSession()
    started(DraftModelStepper(session, V, GreedyTopK()), TEXT)
    text = [*TEXT, 7, 7]
    check_same(started(DraftModelStepper(session, V, GreedyTopK()), text), expected(GreedyTopK(), text, len(text)))
    assert session.prefills == [[4, 8, 9], [11]]
    check_same(started(DraftModelStepper(session, V, GreedyTopK()), [5]), expected(GreedyTopK(), [5], 1))


@pytest.mark.parametrize("kind", ["linear", "recurrent"])
def test_only_the_end_of_a_text_longer_than_the_window_is_read(kind: str) -> None:
    model = ToyModel(seed=5, vocab_size=V, order=30)  # logits tell how much was given
    session = open_session(kind, model)
    stepper = DraftModelStepper(session, V, GreedyTopK())
    assert stepper.lag(TEXT) == 10
    check_same(started(stepper, TEXT, 4), expected(GreedyTopK(), TEXT, 4, model=model))
    assert (session.position, stepper.lag([*TEXT, 1, 1])) == (4, 2)
    text = [*TEXT, 1, 1]
    check_same(started(stepper, text, 4), expected(GreedyTopK(), text, 6, model=model))  # goes on from there
    text += [2, 3, 4, 5]
    check_same(started(stepper, text, 4), expected(GreedyTopK(), text, 10, model=model))
    text += [2, 3, 4, 5, 6]
    check_same(started(stepper, text, 4), expected(GreedyTopK(), text, 4, model=model))  # too far behind
    check_same(
        started(DraftModelStepper(session, V, GreedyTopK()), TEXT, 10), expected(GreedyTopK(), TEXT, 10, model=model)
    )


@pytest.mark.parametrize("kind", ["linear", "recurrent"])
@pytest.mark.parametrize("size", [2, 3, 8, 13])
def test_a_small_draft_context_continues_from_the_end_of_the_text(kind: str, size: int) -> None:
    model = ToyModel(seed=5, vocab_size=V, order=30)
    session = open_session(kind, model, size)
    stepper = DraftModelStepper(session, V, GreedyTopK())
    text: list[int] = [3]
    for round_ in range(40):
        options: Candidates | None = started(stepper, text)
        held = session.position
        assert min(len(text), size // 2) <= held <= size
        check_same(options, expected(GreedyTopK(), text, held, model=model))
        drafted: list[int] = []
        while options is not None:
            drafted.append(options.tokens[0])
            options = stepper.step(drafted[-1])
        assert len(drafted) == size - held + 1, "to the end of its context"
        text += [*drafted[: round_ % 3], round_ % V]


@pytest.mark.parametrize("target_vocab", [6, 8, 11])
@pytest.mark.parametrize("name", ["best", "drawn"])
def test_other_numbers_of_padding_ids(target_vocab: int, name: str) -> None:
    """Only ids that both models have are options, with probabilities over the target's ids."""
    choice = choice_named(name, target_vocab)
    for first in range(6):
        stepper = DraftModelStepper(ToySession(MODEL), target_vocab, choice)
        text = [first, 1, 2, 3]
        for _ in range(4):
            wanted = copy.deepcopy(choice)
            options = started(stepper, text)
            check_same(options, expected(wanted, text, len(text), target_vocab))
            assert max(options.tokens) < min(V, target_vocab)
            if options.q is not None:
                assert len(options.q) == target_vocab and options.q.sum() == pytest.approx(1)
                assert not options.q[V:].any()
            text.append(options.tokens[0])


@pytest.mark.parametrize("kind", ["linear", "recurrent"])
def test_text_with_ids_that_the_draft_lacks(kind: str) -> None:
    """No candidates while such an id would have to be read; it goes on where the window no longer reaches it."""
    session = open_session(kind, MODEL)
    stepper = DraftModelStepper(session, 11, GreedyTopK())
    assert stepper.start([1, 9, 2], ALL) is None
    assert stepper.start([1, 9, 2, 3, 4, 5], ALL) is None
    text = [1, 9, 2, 3, 4, 5]
    stepper.sync(text)
    options = stepper.start(text, 4)
    check_same(options, expected(GreedyTopK(), text, 4, 11))
    text += [6, 8, 7]  # 8 is the first id that the draft lacks
    stepper.sync(text)
    assert stepper.start(text, 4) is None
    text += [1, 2]
    stepper.sync(text)
    check_same(stepper.start(text, 3), expected(GreedyTopK(), text, 3, 11))


@pytest.mark.parametrize("calls", range(1, 12))
@pytest.mark.parametrize("kind", ["linear", "recurrent"])
def test_after_a_cancellation_the_session_drafts_again(kind: str, calls: int) -> None:
    alarm = Alarm(calls)
    session = open_session(kind, MODEL, check=alarm)
    stepper = DraftModelStepper(session, V, GreedyTopK())
    with pytest.raises(Cancelled):
        options = stepper.start(TEXT, ALL)
        while options is not None:
            options = stepper.step(options.tokens[0])
    text = [*TEXT, 3]
    check_same(started(DraftModelStepper(session, V, GreedyTopK()), text), expected(GreedyTopK(), text, len(text)))
