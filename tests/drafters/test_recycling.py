"""Token recycling against naive searches; what it learns from a round, and where it learns nothing."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.backends.toy_session import ToyModel, ToySession
from edgespec.core.arrays import Logits
from edgespec.core.draft_tree import DraftTree
from edgespec.core.drafter import Outcome
from edgespec.core.protocols import NO_DRAFT, Budget, Draft, Round
from edgespec.core.scores import HostScores
from edgespec.drafters.recycling import _LEAST_PATH, WIDTH, RecyclingDrafter, SuccessorTable
from edgespec.drafters.registry import SlotMemory, SlotResources, drafter_specs
from edgespec.memory.memory import Memory

V = 12
ROWS = st.lists(st.integers(-12, 12), min_size=V, max_size=V)


class DeviceScores(HostScores):
    """Scores whose rows the host has not read."""

    def host_logits(self, row: int) -> Logits | None:
        return None


def row(**scores: float) -> Logits:
    """[V] -20, but for the tokens that are named: t3=1.5."""
    logits = np.full(V, -20, np.float32)
    for name, score in scores.items():
        logits[int(name[1:])] = score
    return logits


def open_drafter() -> tuple[RecyclingDrafter, SuccessorTable]:
    table = SuccessorTable(V)
    drafter = RecyclingDrafter(lambda: table)
    drafter.begin([1], None)
    return drafter, table


def propose(drafter: RecyclingDrafter, root: int, limit: Budget) -> dict[tuple[int, ...], float]:
    tree = DraftTree()
    for _ in drafter.expand(tree, [0, root], limit):
        pass
    return {tuple(tree.path_tokens(node)): votes["recycling"] for node, votes in enumerate(tree.votes)}


@given(ROWS)
def test_successors_are_the_most_probable_tokens(scores: list[int]) -> None:
    table = SuccessorTable(V)
    table.learn(5, np.array(scores, np.float32) / 4)
    best = max(scores)
    wanted = sorted((token for token in range(V) if scores[token] > best - 16), key=lambda token: -scores[token])
    found = table.successors(5)
    weights = np.exp(np.array([scores[token] for token in wanted]) / 4)
    assert [token for token, _ in found] == wanted[:WIDTH]
    assert [share for _, share in found] == pytest.approx((weights / weights.sum())[:WIDTH], rel=2e-3)
    assert not table.successors(4)
    table.learn(5, row(t2=1))
    assert table.successors(5) == [(2, 1.0)]


@given(st.lists(ROWS, min_size=4, max_size=4), st.integers(1, 4), st.integers(1, 12))
def test_the_most_probable_paths_are_proposed(rows: list[list[int]], depth: int, nodes: int) -> None:
    drafter, table = open_drafter()
    for token, scores in enumerate(rows):
        table.learn(token, np.array(scores, np.float32) / 2)
    found = propose(drafter, 0, Budget(depth, nodes))
    paths: dict[tuple[int, ...], float] = {}
    ends = {(): 1.0}
    for _ in range(depth):
        ends = {
            (*path, token): reached * share
            for path, reached in ends.items()
            for token, share in table.successors(path[-1] if path else 0)
            if reached * share >= _LEAST_PATH
        }
        paths |= ends
    chosen = sorted(paths.values(), reverse=True)[:nodes]
    best, root = [], 0
    for _ in range(min(depth, nodes)):
        root = next((token for token, _ in table.successors(root)), V)
        if (*best, root) not in paths:
            break
        best.append(root)
    chain = {tuple(best[: i + 1]) for i in range(len(best))}
    assert chain <= found.keys() <= paths.keys() and all(len(path) < 2 or path[:-1] in found for path in found)
    assert len(found) <= len(chosen) + len(chain)
    assert all(sum(paths[path] >= least - 1e-9 for path in found) >= n for n, least in enumerate(chosen, 1))


def test_what_a_round_teaches() -> None:
    """All its rows; where a token has several, that of the accepted path."""
    drafter, table = open_drafter()
    table.learn(1, row(t2=1, t3=0))
    draft = Draft(np.array([2, 3, 2], np.int32), np.array([-1, -1, 1], np.int32))
    scores = HostScores([row(t3=1), row(t9=1), row(t2=1), row(t4=1)])
    done = Round([0, 1, 3, 2, 4], (3, 2, 4), draft, (1, 2), 2, scores)
    outcomes = drafter.observe(done)
    assert [outcome.is_right for outcome in outcomes] == [False, True], "it knew two successors of 1, and nothing else"
    assert [outcome.confidence for outcome in outcomes] == pytest.approx([0.731, 0.269], abs=1e-3)
    assert [table.successors(token) for token in (1, 2, 3)] == [[(3, 1.0)], [(4, 1.0)], [(2, 1.0)]]
    assert drafter.observe(done) == [Outcome(1.0, True)] * 3
    assert propose(drafter, 1, Budget(3, 3)) == {(3,): 1.0, (3, 2): 1.0, (3, 2, 4): 1.0}


def test_scores_that_are_not_on_the_host_are_not_read() -> None:
    """The emitted tokens are what it learns from then."""
    drafter, table = open_drafter()
    for text in ([1, 2, 1, 3], [1, 3]):
        scores = DeviceScores([row(t9=1)])
        drafter.observe(Round(text, tuple(text[1:]), NO_DRAFT, (), 0, scores))
    assert table.successors(1) == [(3, 0.5), (2, 0.125)] and table.successors(2) == [(1, 0.5)]
    for token in range(V):
        table.follow(1, token)
    assert [token for token, _ in table.successors(1)] == [*range(V)][: -WIDTH - 1 : -1]


@given(st.lists(st.tuples(st.integers(0, V - 1), ROWS), max_size=20))
def test_tables_are_loaded_as_they_were(learned: list[tuple[int, list[int]]]) -> None:
    table = SuccessorTable(V)
    for token, scores in learned:
        table.learn(token, np.array(scores, np.float32))
    saved = table.dump()
    loaded = SuccessorTable.load(V, saved)
    assert list_rows(loaded) == list_rows(table) and loaded.dump() == saved


def list_rows(table: SuccessorTable) -> list[list[tuple[int, float]]]:
    return [table.successors(token) for token in range(V)]


def damage(saved: bytes) -> Sequence[bytes]:
    """Dumps of another vocabulary, cut ones, ones with other tokens and shares."""
    at = np.frombuffer(saved, np.uint8).copy()
    token, share = at.copy(), at.copy()
    token[8:12] = 255
    share[-1] = 0x7F
    other = SuccessorTable(V + 1)
    other.learn(V, np.zeros(V + 1, np.float32))
    return [other.dump(), saved[:-1], saved[:3], b"", token.tobytes(), share.tobytes()]


def test_a_damaged_table_is_empty() -> None:
    table = SuccessorTable(V)
    table.learn(3, np.zeros(V, np.float32))
    for saved in (None, *damage(table.dump())):
        assert not any(list_rows(SuccessorTable.load(V, saved))), saved


def test_the_table_is_that_of_the_namespace(tmp_path: Path) -> None:
    """Slots share it, and it outlives the process. Without a memory each generation has its own."""
    memory = Memory(tmp_path, "letters", 2**20)
    target = ToySession(ToyModel(vocab_size=V))
    slots = [SlotMemory() for _ in range(2)]
    drafters = [drafter_specs()["recycling"].open(SlotResources(target, V, memory=slot)) for slot in slots]

    def learn(text: list[int]) -> None:
        drafters[0].begin(text[:1], None)
        for at, (_, token) in enumerate(pairwise(text), 2):
            scores = HostScores([row(**{f"t{token}": 1})])
            drafters[0].observe(Round(text[:at], (token,), NO_DRAFT, (), 0, scores))

    def count(which: int, root: int = 1) -> int:
        tree = DraftTree()
        drafters[which].begin([0], None)
        for _ in drafters[which].expand(tree, [0, root], Budget(4, 4)):
            pass
        return len(tree)

    learn([1, 2, 3])
    assert count(0) == 0
    slots[0].space = slots[1].space = memory.space("")
    learn([1, 2, 3])
    assert count(0) == count(1) == 2
    slots[1].space = memory.space("another")
    assert count(1) == 0
    memory.close()
    memory = Memory(tmp_path, "letters", 2**20)
    slots[1].space = memory.space("")
    assert count(1) == 2
    slots[1].space = None
    assert count(1) == 0
    memory.close()
