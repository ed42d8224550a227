"""Segment files: every byte counts; which of them are built and merged."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.memory.index import MAX_SEGMENT, MIN_BUILD, QUICK_SEGMENT, plan_build
from edgespec.memory.queries import SegmentRow
from edgespec.memory.segments import DamagedSegment, build_segment, open_segment
from tests.memory.test_index import make_text


def test_every_byte_of_a_file_is_checked(tmp_path: Path) -> None:
    """A file with one bit changed, or cut anywhere, is refused, or it reads as before (padding)."""
    path = tmp_path / "segment"
    data = build_segment([make_text([1, 2, 3, 1, 2], answer=3), make_text([7, 8], n_lead=1)])
    path.write_bytes(data)
    good = open_segment(path)
    refused = 0
    for i in range(len(data)):
        path.write_bytes(data[:i] + bytes([data[i] ^ 16]) + data[i + 1 :])
        try:
            read = open_segment(path)
        except DamagedSegment:
            refused += 1
        else:
            assert read.order.tolist() == good.order.tolist() and read.read(1, 9) == [1, 2, 3, 1, 2]
        path.write_bytes(data[:i])
        with pytest.raises(DamagedSegment):
            open_segment(path)
    assert refused >= len(data) - 8


def run_plans(sizes: list[int], built: list[SegmentRow]) -> list[SegmentRow]:
    """The segments of texts 1, 2, ... with so many tokens, after all plans were carried out."""
    for _ in range(100):
        end = built[-1].last if built else 0
        unindexed = [(i, n) for i, n in enumerate(sizes, 1) if i > end]
        plan = plan_build(unindexed, built)
        if plan is None:
            return built
        inside = [row for row in built if plan.first <= row.first <= row.last <= plan.last]
        assert set(inside) == set(plan.replaced)
        assert plan.n_tokens == sum(sizes[plan.first - 1 : plan.last])
        assert plan.n_tokens <= MAX_SEGMENT or plan.first == plan.last
        others = [row for row in built if row not in inside]
        assert all(row.last < plan.first for row in others)
        built = [*others, SegmentRow(f"{plan.first}-{plan.last}", plan.first, plan.last, plan.n_tokens)]
    raise AssertionError("the plans do not end")


some_sizes = st.lists(st.sampled_from([1, 1000, MIN_BUILD, 100_000, MAX_SEGMENT - 1, MAX_SEGMENT + 1]), max_size=12)


@settings(max_examples=100, deadline=None)
@given(some_sizes, st.integers(0, 11))
def test_plans_end_with_all_texts_in_segments(sizes: list[int], kept: int) -> None:
    """Also where the last segments are lost; only a few tokens at the end may be in none."""
    built: list[SegmentRow] = []
    for n in range(len(sizes) + 1):
        built = run_plans(sizes[:n], built)
    built = run_plans(sizes, built[:kept])
    ends = [0, *(row.last for row in built)]
    assert [row.first for row in built] == [end + 1 for end in ends[:-1]]
    assert sum(sizes[ends[-1] :]) < MIN_BUILD


def test_segments_are_few(tmp_path: Path) -> None:
    """As many as the logarithm of the tokens to base 4, while these fit in one segment."""
    built: list[SegmentRow] = []
    sizes: list[int] = []
    most = 0
    while sum(sizes) < MAX_SEGMENT - MIN_BUILD:
        sizes.append(MIN_BUILD)
        built = run_plans(sizes, built)
        most = max(most, len(built))
    assert most <= 5


def test_a_limit_leaves_out_larger_segments() -> None:
    """Otherwise programs that are closed soon would begin the same long merge again and again."""
    sizes = [1_500_000, 370_000, 92_000, 22_000, MIN_BUILD]
    built = [SegmentRow(str(i), i, i, n) for i, n in enumerate(sizes[:4], 1)]
    whole, quick = (plan_build([(5, MIN_BUILD)], built, limit) for limit in (MAX_SEGMENT, QUICK_SEGMENT))
    assert whole is not None and quick is not None
    assert (whole.first, quick.first) == (1, 2) and quick.n_tokens == sum(sizes[1:]) <= QUICK_SEGMENT
