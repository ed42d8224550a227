"""Which states of a text are kept to go back to."""

from __future__ import annotations

from itertools import pairwise

from edgespec.backends.checkpoints import Checkpoints


def test_checkpoints_lie_closer_together_near_the_end() -> None:
    kept = Checkpoints[int]()
    for position in range(1000, 65_000, 1000):
        kept.add(position, position, 1)
    found = []
    while (last := kept.cut(found[-1] - 1 if found else 64_000)) is not None:
        assert last[0] == last[1]
        found.append(last[0])
    assert len(found) == 8 and found[:2] == [64_000, 63_000] and found[-1] <= 32_000
    gaps = [after - before for after, before in pairwise(found)]
    assert gaps == sorted(gaps), found


def test_large_states_are_fewer_and_the_last_one_stays() -> None:
    kept = Checkpoints[str]()
    for name, position in (("a", 10), ("b", 20), ("c", 30)):
        kept.add(position, name, 2**27)
    assert kept.cut(29) is not None
    kept.add(40, "d", 2**40)
    assert kept.cut(99) == (40, "d") and kept.cut(39) is None


def test_a_text_that_turns_back_loses_what_lies_behind() -> None:
    kept = Checkpoints[str]()
    kept.add(10, "a", 1)
    kept.add(20, "b", 1)
    kept.add(20, "c", 1)
    assert kept.cut(25) == (20, "c")
    kept.add(15, "d", 1)
    assert kept.cut(25) == (15, "d") and kept.cut(14) == (10, "a")
    assert kept.is_due(10 + 2048) and not kept.is_due(10 + 2047)


def test_a_state_for_now_is_replaced_by_the_next_one_and_by_no_checkpoint() -> None:
    kept = Checkpoints[str]()
    kept.add(10, "a", 1)
    kept.keep_for_now(14, "b")
    kept.keep_for_now(12, "c")
    kept.add(13, "d", 1)
    assert kept.cut(20) == (13, "d") and kept.cut(12) == (12, "c") and kept.cut(11) == (10, "a")
    kept.clear()
    assert kept.cut(20) is None
