"""The autopilot on recorded texts after long contexts, on a clock whose forwards grow with the position.

Attention takes each row its own time, the weights are read once for all of them: on CPUs multiples of a plain step
therefore grow with the context, while drafts that see only a part of it become cheaper beside the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgespec.autopilot.profile import DraftCost, Profile
from edgespec.autopilot.stats import DraftStats
from tests.autopilot.replay import (
    READING,
    VOCABULARY,
    Clock,
    Curve,
    ReplayDrafter,
    Trace,
    adaptive,
    make_clock,
    mean,
    plain_s,
    read_traces,
    replay,
)

HERE = Path(__file__).parent
GREEDY, SAMPLED = read_traces(HERE / "greedy.json.gz"), read_traces(HERE / "sampled.json.gz")
# Plain steps that a token of context adds to a forward, by rows.
ATTENTION: dict[str, Curve] = {
    "1B, Q4_0": lambda rows: (0.05 + 0.1 * rows) / 1000,  # measured without flash attention
    "8B, Q4_0": lambda rows: 0.12 * rows / 1000,  # every row in full
    "a GPU": lambda rows: (0.02 + 0.002 * rows) / 1000,  # the cache is read once for all rows
}


class AttachedReplay(ReplayDrafter):
    """A draft that shares the target's cache: it has nothing to read."""

    def pending_tokens(self, text: Sequence[int]) -> int:
        return 0


def lengthen(traces: list[Trace], n: int) -> list[Trace]:
    """After a prompt of `n` more tokens that foretell nothing."""
    rng = np.random.default_rng(n)
    return [replace(t, prompt=[*rng.integers(0, VOCABULARY, n).tolist(), *t.prompt]) for t in traces]


def long_clock(name: str, seed: int = 0) -> Clock:
    clock = make_clock(name, seed=seed)
    clock.attention = ATTENTION[name]
    return clock


def make_profile(clock: Clock, contexts: Sequence[int]) -> Profile:
    """As `measure_contexts` would make it."""
    longer = {n: Profile({m: clock.forward_s(m, n) for m in (1, 4, 16)}) for n in contexts}
    cost = DraftCost({1: clock.draft_s}, READING * clock.draft_s)
    return Profile({m: clock.curve(m) for m in range(1, 17)}, {"model": cost}, longer)


def speeds(traces: list[Trace], clock: Clock, profile: Profile, drafter: type[ReplayDrafter]) -> np.ndarray:
    """[texts] times plain decoding."""
    draft_stats, found = DraftStats(profile), []
    for trace in traces:
        model = drafter(trace)
        found.append(plain_s(trace, clock) / replay(adaptive(draft_stats, [model]), [model], trace, clock))
    return np.array(found)


@pytest.mark.parametrize(("name", "position"), [("1B, Q4_0", 8000), ("8B, Q4_0", 32000), ("a GPU", 16000)])
def test_after_long_contexts_no_text_loses_more_than_five_percent_and_drafts_pay(name: str, position: int) -> None:
    """With what is measured on load: 16 rows take 4.97 plain steps after a few tokens, 9 after 32,000 at the 1B."""
    clock = long_clock(name)
    profile = make_profile(clock, (2048,))
    drafter = AttachedReplay if position == 8000 else ReplayDrafter
    sampled = speeds(lengthen(SAMPLED, position), clock, profile, drafter)
    assert mean(sampled) >= 0.98 and sampled.min() > 0.95
    greedy = speeds(lengthen(GREEDY, position), long_clock(name), profile, drafter)
    assert greedy.min() > 0.95
    assert mean(greedy) >= {"1B, Q4_0": 1.08, "8B, Q4_0": 1.0, "a GPU": 1.8}[name]


@pytest.mark.parametrize("name", ["8B, Q4_0", "a GPU"])
def test_short_and_long_texts_in_turn(name: str) -> None:
    """What is learned after one length is not taken for the costs after another."""
    clock = long_clock(name)
    texts = [lengthen([trace], (0, 32000, 8000)[i % 3])[0] for i, trace in enumerate([*SAMPLED, *GREEDY])]
    ours = speeds(texts, clock, make_profile(clock, (2048,)), AttachedReplay)
    assert ours.min() > 0.95
    assert mean(ours) >= {"8B, Q4_0": 1.15, "a GPU": 1.6}[name]


def test_costs_that_were_never_measured_after_long_contexts_are_learned() -> None:
    clock = long_clock("8B, Q4_0")
    ours = speeds(lengthen(SAMPLED, 32000), clock, make_profile(clock, ()), AttachedReplay)
    assert mean(ours) >= 0.97 and ours.min() > 0.93
