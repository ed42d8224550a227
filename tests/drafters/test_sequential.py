"""SequentialDrafter on toy sessions: the most probable tokens and their siblings, or a drawn chain."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.backends.toy_session import ToyModel, ToySession
from edgespec.core.arrays import Probs
from edgespec.core.draft_tree import DraftTree
from edgespec.core.protocols import Budget, Draft
from edgespec.core.sampling import Sampler, SamplingParams
from edgespec.core.weights import index_at
from edgespec.drafters.candidates import MAX_SIBLINGS, RequestDraw, best_tokens
from edgespec.drafters.sequential import ModelDraftSession, SequentialDrafter
from edgespec.errors import BackendError
from tests.core.stats import assert_follows
from tests.drafters.sessions import MODEL, CountingSession, LazySession, V

PARAMS = SamplingParams(temperature=0.9, top_k=6, presence_penalty=0.4, penalty_window=6)
_texts = st.lists(st.integers(0, V - 1), min_size=2, max_size=12)


def open_drafter(session: ToySession, vocab_size: int = V) -> SequentialDrafter:
    return SequentialDrafter("model", ModelDraftSession(session, vocab_size))


def begin(drafter: SequentialDrafter, text: list[int], draw: RequestDraw | None = None) -> SequentialDrafter:
    drafter.begin(text[:-1], draw)
    return drafter


def expand(drafter: SequentialDrafter, text: list[int], limit: Budget, units: int = 99) -> DraftTree:
    tree = DraftTree()
    for n, _ in enumerate(drafter.expand(tree, text, limit), 1):
        if n == units:
            break
    return tree


def make_draw(seed: int, vocab_size: int = V) -> RequestDraw:
    return RequestDraw(Sampler(PARAMS, vocab_size), np.random.default_rng(seed))


def probabilities(text: list[int]) -> Probs:
    z = MODEL.logits(text).astype(float)
    p: Probs = np.exp(z - z.max()) / np.exp(z - z.max()).sum()
    return p


@given(_texts, st.integers(1, 5))
@settings(deadline=None)
def test_the_greedy_path_and_its_siblings(text: list[int], depth: int) -> None:
    tree = expand(begin(open_drafter(CountingSession()), text), text, Budget(depth, depth))
    wanted: dict[tuple[int, ...], float] = {}
    path: list[int] = []
    for _ in range(depth):
        p = probabilities([*text, *path])
        order = sorted((i for i in range(V) if p[i] >= p.max() * np.exp(-4.0)), key=lambda i: (-p[i], i))[
            : 1 + MAX_SIBLINGS
        ]
        wanted |= {(*path, token): p[token] for token in order}
        path.append(order[0])
    found = {tuple(tree.path_tokens(node)): votes["model"] for node, votes in enumerate(tree.votes)}
    assert found == pytest.approx(wanted, rel=1e-5)
    assert tree.path_tokens(tree.deepest("model"))[:-1] == path[:-1]
    assert not any(q is not None for q in tree.q)


@given(_texts, st.integers(1, 5), st.integers(1, 6))
@settings(deadline=None)
def test_a_unit_is_a_token_and_costs_a_forward(text: list[int], depth: int, units: int) -> None:
    session = CountingSession()
    tree = expand(begin(open_drafter(session), text), text, Budget(depth, depth), units)
    assert max(tree.depths) == min(units, depth) == len(session.rows)
    assert sum(session.rows) == len(session.rows), "one token each; the text before was a prefill"


@given(_texts, st.integers(0, 2**32), st.integers(1, 5))
@settings(deadline=None)
def test_drawn_chains_carry_their_distributions(text: list[int], seed: int, depth: int) -> None:
    drafter = begin(open_drafter(CountingSession()), text, make_draw(seed))
    assert drafter.is_drawn and drafter.draft_async(text, Budget(depth, depth)) is None
    draft = expand(drafter, text, Budget(depth, depth)).drawn()
    assert len(draft) == depth and draft.q is not None
    rng, sampler, prefix = np.random.default_rng(seed), Sampler(PARAMS, V), list(text)
    for token, q in zip(draft.tokens.tolist(), draft.q, strict=True):
        distribution = sampler.distribution(MODEL.logits(prefix), prefix)
        assert q.tolist() == distribution.dense(V).tolist()
        assert token == distribution.token(index_at(distribution.weights, rng.random()))
        prefix.append(token)


@given(_texts, st.integers(0, 2**32), st.integers(1, 4), st.integers(0, 12))
@settings(deadline=None)
def test_drawn_trees_carry_the_distributions_of_siblings(text: list[int], seed: int, depth: int, more: int) -> None:
    """The q of a sibling is that of a token behind those before it, and every level has some."""
    drafter = open_drafter(ToySession(MODEL))
    draw = RequestDraw(Sampler(PARAMS, V), np.random.default_rng(seed), takes_trees=True)
    drafter.begin(text[:-1], draw)
    tree = expand(drafter, text, Budget(depth, depth + more))
    draft = tree.drawn()
    assert draft.q is not None and depth <= len(draft) <= depth + more and max(tree.depths) == depth
    sampler = Sampler(PARAMS, V)
    for parent in (-1, *range(len(tree))):
        prefix = [*text, *tree.path_tokens(parent)]
        rest = sampler.distribution(MODEL.logits(prefix), prefix).dense(V)
        for child in tree.children(parent):
            np.testing.assert_allclose(draft.q[child], rest / rest.sum(), atol=1e-12)
            rest[tree.tokens[child]] = 0.0


def test_the_shape_of_a_drawn_tree_is_settled_before_its_nodes_are_drawn() -> None:
    """Two draws whose first levels are equal have as many children below each node of it."""
    text, budget, shapes = [1, 2, 3], Budget(3, 9), dict[tuple[int, ...], set[tuple[int, ...]]]()
    for seed in range(300):
        drafter = open_drafter(ToySession(MODEL))
        drafter.begin(text[:-1], RequestDraw(Sampler(PARAMS, V), np.random.default_rng(seed), takes_trees=True))
        tree = expand(drafter, text, budget)
        first = tree.children(-1)
        assert len(first) == 3
        below = tuple(len(tree.children(node)) for node in first)
        shapes.setdefault(tuple(tree.tokens[node] for node in first), set()).add(below)
    assert max(len(each) for each in shapes.values()) == 1
    assert len(shapes) > 10


def test_drawn_tokens_follow_what_they_carry() -> None:
    """Penalties included; the second token depends on the first."""
    text, sampler, draw = [1, 2, 3], Sampler(PARAMS, V), make_draw(11)
    distribution = sampler.distribution(MODEL.logits(text), text).dense(V)
    drafter = open_drafter(ToySession(MODEL))
    counts, pairs = np.zeros(V, int), np.zeros((V, V), int)
    for _ in range(1500):
        first, second = expand(begin(drafter, text, draw), text, Budget(2, 2)).tokens
        counts[first] += 1
        pairs[first, second] += 1
    assert_follows(counts.tolist(), distribution.tolist())
    for token in np.flatnonzero(counts > 150).tolist():
        prefix = [*text, token]
        assert_follows(pairs[token].tolist(), sampler.distribution(MODEL.logits(prefix), prefix).dense(V).tolist())


@pytest.mark.parametrize("is_drawn", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 8, 13])
def test_to_the_end_of_the_context(size: int, is_drawn: bool) -> None:
    """A small draft context goes on from the end of the text, and is filled, never more."""
    session = CountingSession(context_size=size)
    drafter = open_drafter(session)
    text = [3, 1]
    drafter.begin(text[:-1], make_draw(1) if is_drawn else None)
    for round_ in range(25):
        tree = expand(drafter, text, Budget(20, 20))
        assert session.position == size
        path = tree.path_tokens(tree.deepest("model"))
        assert 1 <= len(path) <= size
        text += [*path[: round_ % 3], round_ % V]


@given(_texts, st.integers(1, 6), st.sampled_from([8, 12, 256]))
@settings(deadline=None)
def test_unread_chains_are_those_of_expand(text: list[int], n: int, size: int) -> None:
    """On a session that does not wait for the device; the next round is that after any chain."""
    lazy, eager = LazySession(context_size=size), CountingSession(context_size=size)
    one, other = begin(open_drafter(lazy), text), begin(open_drafter(eager), text)
    assert other.draft_async(text, Budget(n, n)) is None
    for emitted in (2, 0, 1):
        chain = one.draft_async(text, Budget(n, n))
        assert isinstance(chain, Draft)
        tree = expand(other, text, Budget(n, n))
        path = tree.path_tokens(tree.deepest("model"))
        greedy = [*path[:-1], tree.tokens[tree.proposals(find(tree, path[:-1]), "model")[0]]]
        common = min(len(chain), len(greedy))  # near its end a small context may start anew for a chain
        assert chain.tokens[:common].tolist() == greedy[:common]
        assert size < 256 or common == n
        assert chain.is_chain and chain.q is None and 1 <= len(chain) <= n
        assert len(chain) == n or lazy.position == size
        text = [*text, *greedy[: min(emitted, common)], 0]


@given(_texts, st.integers(2, 4), st.integers(5, 20), st.sampled_from([0.0, 0.05, 0.2]))
@settings(deadline=None)
def test_a_tree_continues_the_most_probable_paths(text: list[int], depth: int, nodes: int, reach: float) -> None:
    session = CountingSession()
    tree = expand(begin(open_drafter(session), text), text, Budget(depth, nodes, reach=reach))
    reached: list[float] = []
    for node, votes in enumerate(tree.votes):
        path = tree.path_tokens(node)
        assert votes["model"] == pytest.approx(probabilities([*text, *path[:-1]])[path[-1]], rel=1e-5)
        reached.append(votes["model"] * (reached[tree.parents[node]] if tree.parents[node] >= 0 else 1.0))
    assert max(tree.depths) <= depth and len(session.rows) <= depth
    continued = [node for node in range(len(tree)) if tree.children(node)]
    assert all(reached[node] >= reach for node in continued)
    if len(session.rows) < depth:  # then nothing was left to continue
        best = sorted(reached, reverse=True)[: nodes - 1]
        left = [n for n in range(len(tree)) if tree.depths[n] < depth and n not in continued and reached[n] in best]
        assert not [node for node in left if reached[node] >= max(reach, 1e-9) and reached[node] > best[-1]]
    else:  # the most probable one was continued in every unit but the last
        first = max(tree.children(-1), key=lambda node: reached[node])
        assert first in continued or reached[first] < reach


@pytest.mark.parametrize("limit", [Budget(4, 4), Budget(4, 12, reach=0.6)])
def test_one_path_is_a_chain(limit: Budget) -> None:
    session, text = CountingSession(), [1, 2, 3]
    tree = expand(begin(open_drafter(session), text), text, limit)
    assert session.rows == [1, 1, 1, 1], "none of it runs again"
    assert sum(bool(tree.children(node)) for node in range(len(tree))) == 3


def test_a_large_tree_has_room_for_all_forwards() -> None:
    """A node for each further one stays free, so that predictable texts have long paths."""
    session, text = CountingSession(model=ToyModel(seed=5, vocab_size=V, order=3, sharpness=9.0)), [1, 2, 3]
    tree = expand(begin(open_drafter(session), text), text, Budget(15, 250))
    assert max(tree.depths) > 12 and len(session.rows) == 15 and 32 < max(session.rows) <= 64


def test_a_tree_that_is_one_path_runs_nothing_again() -> None:
    session, text = CountingSession(model=ToyModel(seed=5, vocab_size=V, order=3, sharpness=9.0)), [1, 2, 3]
    tree = expand(begin(open_drafter(session), text), text, Budget(5, 40, reach=0.3))
    continued = sum(bool(tree.children(node)) for node in range(len(tree)))
    assert session.rows == [1] * (1 + continued) and continued > 1


def test_a_tree_ends_where_its_session_has_no_room() -> None:
    session, text = CountingSession(most=5), [1, 2, 3]
    tree = expand(begin(open_drafter(session), text), text, Budget(4, 20))
    assert max(session.rows) <= 6 and max(tree.depths) < 4


def find(tree: DraftTree, path: list[int]) -> int:
    node = -1
    for token in path:
        (node,) = (child for child in tree.children(node) if tree.tokens[child] == token)
    return node


@pytest.mark.parametrize("target_vocab", [6, 8, 11])
@pytest.mark.parametrize("is_drawn", [False, True])
def test_other_numbers_of_padding_ids(target_vocab: int, is_drawn: bool) -> None:
    """Only ids that both models have are proposed, with distributions over the target's ids."""
    drafter = open_drafter(CountingSession(), target_vocab)
    lazy = open_drafter(LazySession(), target_vocab)
    for first in range(6):
        text = [first, 1, 2, 3]
        begin(drafter, text, make_draw(first, target_vocab) if is_drawn else None)
        tree = expand(drafter, text, Budget(4, 7))
        assert max(tree.tokens) < min(V, target_vocab)
        for q in tree.q:
            assert (q is not None) == is_drawn
            assert q is None or (q.shape == (target_vocab,) and q.sum() == pytest.approx(1) and not q[V:].any())
        chain = begin(lazy, text).draft_async(text, Budget(4, 4))
        assert chain is not None and chain.tokens.max() < min(V, target_vocab)


def test_nothing_is_proposed_after_tokens_that_the_draft_lacks() -> None:
    drafter, lazy = open_drafter(CountingSession(), 11), open_drafter(LazySession(), 11)
    text = [1, 9, 2]
    assert not len(expand(begin(drafter, text), text, Budget(3, 3)))
    assert begin(lazy, text).draft_async(text, Budget(3, 3)) is None
    assert len(expand(drafter, [*text, 1], Budget(3, 3, 2))), "what lies before the window is not read"


@pytest.mark.parametrize("score", [np.nan, np.inf, -np.inf])
def test_scores_that_are_no_numbers_are_an_error(score: float) -> None:
    logits = np.full(V, -np.inf, np.float32)
    logits[3] = score
    with pytest.raises(BackendError, match="NaN or infinite logits"):
        best_tokens(logits)
    with pytest.raises(BackendError, match="NaN or infinite logits"):
        make_draw(0).draw(logits, [1])
