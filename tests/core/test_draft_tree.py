"""DraftTree: examples, and any sequence of operations against a naive model of paths and votes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.core.draft_tree import DraftTree
from edgespec.core.protocols import NO_DRAFT
from edgespec.core.tree import check_draft, path_to

V = 4


def test_only_drawn_tokens_are_verified_as_drawn() -> None:
    q = np.array([[0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1]])
    tree = DraftTree()
    assert tree.drawn() is NO_DRAFT
    tree.add(-1, 3, "model", 0.4, q[0])
    tree.add(0, 0, "model", 0.4, q[1])
    draft = tree.drawn()
    check_draft(draft, V)
    assert (draft.tokens.tolist(), draft.is_chain, draft.drafters) == ([3, 0], True, ("model", "model"))
    assert draft.q is not None and (draft.q == q).all()
    tree.add(1, 2, "ngram", 3.0)
    with pytest.raises(ValueError, match="only drawn tokens"):
        tree.drawn()
    tree.truncate(2)
    tree.add(0, 1, "model", 0.3, q[1])
    siblings = tree.drawn()
    assert siblings.q is not None and len(siblings.q) == 3 and siblings.parents.tolist() == [-1, 0, 0]


Path = tuple[int, ...]
operations = st.lists(
    st.one_of(
        st.tuples(
            st.just("add"),
            st.integers(0, 12),
            st.integers(0, V - 1),
            st.sampled_from(["model", "ngram", "pard"]),
            st.sampled_from([0.1, 0.5, 0.9]),
        ),
        st.tuples(st.just("truncate"), st.integers(0, 12), st.none(), st.none(), st.none()),
        st.tuples(st.just("changed"), st.none(), st.none(), st.none(), st.none()),
    ),
    max_size=40,
)


@given(operations, st.data())
def test_any_operations(operations, data: st.DataObject) -> None:  # type: ignore[no-untyped-def]
    """The model is a dictionary from paths to votes, in the order in which they were added."""
    tree, known = DraftTree(), dict[Path, dict[str, float]]()
    changed: set[Path] = set()
    for name, n, token, source, confidence in operations:
        paths: list[Path] = [(), *known]
        if name == "add":
            above = paths[n % len(paths)]
            path = (*above, token)
            node = tree.add(paths.index(above) - 1, token, source, confidence)
            votes = known.setdefault(path, {})
            votes[source] = max(confidence, votes.get(source, 0.0))
            changed |= {each for each in known if each[:-1] == above}
            assert node == list(known).index(path)
        elif name == "truncate":
            lost = list(known)[n:]
            known = dict(list(known.items())[:n])
            tree.truncate(n)
            changed = {each for each in known if each in changed or any(each[:-1] == path[:-1] for path in lost)}
        else:
            first = tree.take_changed()
            assert first <= min((list(known).index(path) for path in changed), default=len(known)) <= len(known)
            changed = set()
    check_against(tree, known)
    kept = data.draw(st.sets(st.integers(0, max(0, len(known) - 1)))) if known else set()
    paths = list(known)
    kept |= {paths.index(paths[node][:n]) for node in kept for n in range(1, len(paths[node]))}
    draft = tree.select(kept)
    check_draft(draft, V)
    assert {
        tuple(draft.tokens[list(path_to(draft, node))].tolist()): source for node, source in enumerate(draft.drafters)
    } == {paths[node]: "+".join(known[paths[node]]) for node in kept}


def check_against(tree: DraftTree, known: dict[Path, dict[str, float]]) -> None:
    paths = list(known)
    assert len(tree) == len(tree.tokens) == len(paths)
    assert [tuple(tree.path_tokens(node)) for node in range(len(tree))] == paths
    assert tree.parents == [paths.index(path[:-1]) if len(path) > 1 else -1 for path in paths]
    assert tree.depths == [len(path) for path in paths]
    assert tree.votes == list(known.values())
    assert [list(votes) for votes in tree.votes] == [list(votes) for votes in known.values()]
    for above in ((), *paths):
        node = paths.index(above) if above else -1
        assert list(tree.children(node)) == [paths.index(path) for path in paths if path and path[:-1] == above]
        for source in ("model", "ngram", "pard"):
            below = [path for path in paths if path[:-1] == above and path and source in known[path]]
            below.sort(key=lambda path: -known[path][source])
            assert tree.proposals(node, source) == [paths.index(path) for path in below]
    for source in ("model", "ngram", "pard"):
        voted = [path for path in paths if source in known[path]]
        voted.sort(key=lambda path: (-len(path), -path_confidence(known, path, source)))
        assert tree.deepest(source) == (paths.index(voted[0]) if voted else -1)


def path_confidence(known: dict[Path, dict[str, float]], path: Path, source: str) -> float:
    """The product from the end of the path to its start, since another order of factors may round otherwise."""
    return math.prod(known[path[:n]].get(source, 1.0) for n in range(len(path), 0, -1))
