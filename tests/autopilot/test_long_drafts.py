"""Drafts of up to 63 tokens: where text repeats for long and rows are cheap, and nowhere else."""

from __future__ import annotations

import numpy as np
import pytest

from edgespec.autopilot.adaptive import Adaptive
from edgespec.autopilot.profile import Profile
from edgespec.autopilot.stats import DraftStats
from edgespec.core.protocols import Step
from edgespec.drafters.ngram import NgramDrafter
from tests.autopilot.replay import VOCABULARY, Clock, Trace, count_plain_steps, replay

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 24, 32, 48, 64)
CURVES = {"flat": lambda rows: 1 + 0.016 * (rows - 1), "steep": lambda rows: 1 + 0.35 * (rows - 1)}


class Listening(Adaptive):
    """Keeps the number of tokens of each draft, and of those that were accepted."""

    def record(self, step: Step) -> None:
        DRAFTS.append((step.n_drafted, step.n_accepted))
        super().record(step)


DRAFTS: list[tuple[int, int]] = []


def run(texts: list[Trace], curve: str) -> np.ndarray:
    """[texts] times plain decoding."""
    DRAFTS.clear()
    clock = Clock(CURVES[curve], 0.1, np.random.default_rng(0))
    draft_stats, speeds = DraftStats(Profile({rows: clock.curve(rows) for rows in ROWS})), []
    for text in texts:
        controller = Listening([NgramDrafter()], draft_stats, "greedy", VOCABULARY, takes_trees=lambda: True)
        speeds.append(count_plain_steps(text) / replay(controller, [], text, clock))
    return np.array(speeds)


def make_texts(lengths: range, seed: int = 0) -> list[Trace]:
    """Parts of the prompt, each of as many tokens as one of `lengths`, in any order."""
    rng = np.random.default_rng(seed)
    texts = []
    for i in range(6):
        prompt = rng.integers(0, VOCABULARY, 700).tolist()
        text: list[int] = []
        while len(text) < 600:
            start = int(rng.integers(0, 700 - lengths.stop))
            text += prompt[start : start + int(rng.choice(lengths))]
        texts.append(Trace(f"{i}", "edit", prompt, text, []))
    return texts


def test_long_repetition_is_drafted_in_rounds_of_64_rows() -> None:
    speeds = run(make_texts(range(400, 600)), "flat")
    assert speeds.min() > 8 and max(DRAFTS) == (63, 63)
    assert sum(drafted for drafted, _ in DRAFTS) < 1.3 * sum(accepted for _, accepted in DRAFTS)


@pytest.mark.parametrize("lengths", [range(4, 9), range(8, 40)])
def test_where_matches_break_off_drafts_are_short(lengths: range) -> None:
    speeds = run(make_texts(lengths), "steep")
    assert speeds.min() > 0.97
    drafted = [drafted for drafted, _ in DRAFTS if drafted]
    assert np.mean(drafted) < lengths.stop and max(drafted) < 63
