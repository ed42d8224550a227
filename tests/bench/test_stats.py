"""Statistics of a bench against answers known by hand."""

from __future__ import annotations

import math

import pytest

from edgespec.bench.summary import Group, Summary
from tests.bench.lines import FAULT, HINDSIGHT, NEAR_TIE, run, summary_of


def group(part: Summary, arm: str) -> Group:
    (found,) = (g for g in part.arms if g.arm == arm)
    return found


def test_ratios_are_paired_medians_of_repeats() -> None:
    speeds = {"a": ((10, 30, 11), (90, 22, 1)), "b": ((8, 8, 8), (4, 3, 5))}
    lines = [
        run(arm, prompt, speed, repeat=i)
        for prompt, both in speeds.items()
        for arm, repeats in zip(("plain", "autopilot"), both, strict=True)
        for i, speed in enumerate(repeats)
    ]
    summary = summary_of(*lines)
    own = group(summary, "autopilot")
    assert own.speedup is not None
    assert own.speedup.geomean == pytest.approx(1.0)
    assert (own.speedup.n, own.runs, own.below_one) == (2, 6, 0.5)
    assert own.worst_decile == pytest.approx(0.5 + 0.1 * 1.5)
    assert own.tokens_per_second == pytest.approx((8.5, 13, 17.5))


def test_the_bootstrap_draws_prompts_with_all_their_ratios() -> None:
    # Two prompts give (1, 1), (1, 4) or (4, 4) with 1/4, 1/2, 1/4: the interval is from one to the other prompt's mean.
    ratios = [("a", 0.0, 2.0), ("a", 0.7, 8.0), ("b", 0.0, 1.0)]
    lines = [
        run(arm, prompt, 10 * factor, temperature=t)
        for prompt, t, ratio in ratios
        for arm, factor in (("plain", 1), ("autopilot", ratio))
    ]
    ratio = group(summary_of(*lines), "autopilot").speedup
    assert ratio is not None
    assert (ratio.geomean, ratio.low, ratio.high) == pytest.approx((16 ** (1 / 3), 1.0, 4.0))
    assert ratio.n == 3


def test_one_prompt_has_no_interval() -> None:
    lines = [run(arm, "a", 10 * f, temperature=t) for t in (0, 1) for arm, f in (("plain", 1), ("autopilot", 1 + t))]
    ratio = group(summary_of(*lines), "autopilot").speedup
    assert ratio is not None
    assert (ratio.low, ratio.high, ratio.n) == (None, None, 2)
    assert str(ratio) == "1.41"


def test_without_plain_there_is_speed_but_no_ratio() -> None:
    summary = summary_of(
        run("autopilot", "a", 30), run("plain", "b", 10), run("autopilot", "b", 20), run("plain", "a", None)
    )
    own = group(summary, "autopilot")
    assert own.unpaired == 1
    assert own.speedup is not None
    assert (own.speedup.geomean, own.speedup.n) == (2.0, 1)
    assert own.tokens_per_second[1] == 25
    part = summary_of(run("autopilot", "a", 30), run("ngram 7", "a", 20))
    assert group(part, "autopilot").speedup is None
    assert group(part, "autopilot").worst_decile is None
    assert part.oracle is None
    assert part.autopilot_to_best_fixed is not None
    assert part.autopilot_to_best_fixed.geomean == pytest.approx(1.5)


def test_runs_of_one_token_are_counted_and_left_out() -> None:
    summary = summary_of(
        run("plain", "a", 10), run("autopilot", "a", 20), run("autopilot", "a", None, repeat=1),
        run("plain", "b", None), run("autopilot", "b", None),
    )  # fmt: skip
    own = group(summary, "autopilot")
    assert (summary.runs, summary.short_runs) == (5, 3)
    assert (own.runs, own.unpaired, own.tau) == (3, 0, 1.0)
    assert own.speedup is not None
    assert (own.speedup.geomean, own.speedup.n) == (2.0, 1)


def test_only_runs_of_one_token() -> None:
    own = group(summary_of(run("plain", "a", None)), "plain")
    assert (own.speedup, own.tau, own.tokens_per_second, own.time_shares) == (None, None, (), {})


def test_counts_are_pooled_over_runs() -> None:
    a = run(
        "model 2", "a", 20, emitted_tokens=17, target_forwards=10, drafted_tokens=20, accepted_tokens=6,
        alpha_by_depth=[0.5, 0.2],
    )  # fmt: skip
    b = run(
        "model 2", "b", 30, emitted_tokens=67, target_forwards=30, drafted_tokens=60, accepted_tokens=36,
        alpha_by_depth=[0.8, 0.5],
    )  # fmt: skip
    part = summary_of(a, b)
    own = group(part, "model 2")
    assert own.tau == pytest.approx(82 / 40)
    assert own.acceptance_rate == pytest.approx(42 / 80)
    assert own.alpha_by_depth == pytest.approx(((5 + 24) / (10 + 30), (1 + 12) / (5 + 24)))


def test_arms_are_in_an_order_that_a_reader_expects() -> None:
    arms = ["plain", "autopilot", "autopilot cold", "ablation 2", "model 9", "model 10", "model 10 tree"]
    part = summary_of(*(run(arm, "a", 10) for arm in reversed(arms)))
    assert [g.arm for g in part.arms] == arms


def test_nothing_accepted() -> None:
    lost = {"drafted_tokens": 30, "accepted_tokens": 0, "alpha_by_depth": [0.0]}
    part = summary_of(run("plain", "a", 10), run("model 3", "a", 5, **lost))
    own = group(part, "model 3")
    assert (own.acceptance_rate, own.alpha_by_depth, own.tau, own.below_one) == (0.0, (0.0,), 1.0, 1.0)
    assert group(part, "plain").acceptance_rate is None


def test_best_fixed_and_oracle() -> None:
    lines = [run(arm, prompt, speed) for prompt, speeds in HINDSIGHT.items() for arm, speed in speeds.items()]
    part = summary_of(*lines)
    assert (part.best_fixed, part.finished) == ("model 3", 2)
    assert part.oracle is not None
    assert part.autopilot_to_best_fixed is not None
    assert part.autopilot_to_oracle is not None
    assert part.oracle.geomean == pytest.approx(math.sqrt(2.0 * 1.2))
    assert part.autopilot_to_best_fixed.geomean == pytest.approx(math.sqrt(18 / 12 * 11 / 12))
    assert part.autopilot_to_oracle.geomean == pytest.approx(math.sqrt(18 / 20 * 11 / 12))
    assert (part.autopilot_to_oracle.low, part.autopilot_to_oracle.high) == pytest.approx((18 / 20, 11 / 12))
    # A prompt that the bench was interrupted in has no say in what is compared between arms.
    longer = summary_of(*lines, run("plain", "c", 1), run("ngram 7", "c", 100))
    assert (longer.best_fixed, longer.finished, longer.oracle) == (part.best_fixed, 2, part.oracle)
    assert longer.autopilot_to_oracle == part.autopilot_to_oracle
    ratio = group(longer, "ngram 7").speedup
    assert ratio is not None
    assert ratio.geomean == pytest.approx(100 ** (1 / 3))


def test_the_oracle_may_choose_plain() -> None:
    part = summary_of(run("plain", "a", 10), run("autopilot", "a", 9), run("model 3", "a", 5))
    assert part.oracle is not None
    assert part.autopilot_to_oracle is not None
    assert (part.oracle.geomean, part.autopilot_to_oracle.geomean) == pytest.approx((1.0, 0.9))


def test_a_variant_of_the_autopilot_is_no_fixed_arm() -> None:
    speeds = {"plain": 10, "autopilot": 18, "autopilot cold": 30, "model 3": 12}
    part = summary_of(*(run(arm, "a", speed) for arm, speed in speeds.items()))
    assert part.best_fixed == "model 3"
    assert part.autopilot_to_oracle is not None
    assert part.autopilot_to_oracle.geomean == pytest.approx(1.5)


def test_comparisons_that_lack_an_arm() -> None:
    part = summary_of(run("plain", "a", 10), run("autopilot", "a", 20))
    assert (part.best_fixed, part.oracle, part.autopilot_to_best_fixed, part.autopilot_to_oracle) == (None,) * 4
    part = summary_of(run("plain", "a", 10), run("ngram 7", "a", 20))
    assert part.best_fixed == "ngram 7"
    assert part.oracle is not None
    assert (part.autopilot_to_best_fixed, part.autopilot_to_oracle) == (None, None)
    part = summary_of(run("plain", "a", 10), run("ngram 7", "b", 20))
    assert (part.finished, part.best_fixed, part.oracle) == (0, None, None)


def test_splits_by_category_and_temperature() -> None:
    ratios = {("chat", "a", 0.0): 2.0, ("chat", "a", 0.7): 4.0, ("code", "b", 0.0): 0.5, ("code", "b", 0.7): 1.0}
    lines = [
        run(arm, prompt, 10 * factor, category=category, temperature=t)
        for (category, prompt, t), ratio in ratios.items()
        for arm, factor in (("plain", 1), ("autopilot", ratio))
    ]
    part = summary_of(*lines)
    found = {(g.category, g.temperature): g.speedup for g in part.splits if g.arm == "autopilot"}
    means = {split: ratio.geomean for split, ratio in found.items() if ratio}
    by_both = {(category, t): ratio for (category, _, t), ratio in ratios.items()}
    by_one = {("chat", None): math.sqrt(8), ("code", None): math.sqrt(0.5), (None, 0.0): 1.0, (None, 0.7): 2.0}
    assert means == pytest.approx(by_both | by_one)
    assert [g.category for g in part.by_category("autopilot")] == ["chat", "code"]
    assert [g.temperature for g in part.by_temperature("autopilot")] == [0.0, 0.7]


def test_a_single_category_at_one_temperature() -> None:
    lines = [run(arm, p, speed) for p in "ab" for arm, speed in (("plain", 10), ("autopilot", 15))]
    part = summary_of(*lines)
    (only,) = part.by_category("autopilot")
    assert only.category == "chat"
    assert only.speedup == group(part, "autopilot").speedup
    assert part.by_temperature("autopilot") == []


def test_times() -> None:
    times = {"draft_s": 1.0, "verify_s": 5.0, "sample_s": 1.5, "commit_s": 0.5}
    short = {"sample_s": 50.0, "ttft_s": 0.9}
    own = group(
        summary_of(
            run("autopilot", "a", 5, bound_s=1.0, ttft_s=0.1, step_p50_s=0.02, step_p99_s=0.04, **times),
            run("autopilot", "b", 5, bound_s=1.6, ttft_s=0.3, step_p50_s=0.04, step_p99_s=0.08, **times),
            run("autopilot", "c", 5, ttft_s=0.2, step_p50_s=0.03, step_p99_s=0.2),
            run("autopilot", "d", None, bound_s=0.0, **short),
        ),
        "autopilot",
    )
    assert own.time_shares == pytest.approx({"draft": 0.125, "verify": 0.625, "sample": 0.1875, "commit": 0.0625})
    assert own.achieved == pytest.approx((0.5 + 0.8) / 2)  # 10 tokens after the first took 2 s
    assert (own.ttft_s, own.step_p50_s, own.step_p99_s) == pytest.approx((0.25, 0.03, 0.08))


def test_forks() -> None:
    lines = [run("ngram 7", p, 10, fork=fork) for p, fork in (("a", NEAR_TIE), ("b", None), ("c", FAULT))]
    summary = summary_of(*lines)
    assert (summary.forks, summary.faults) == (2, 1)
