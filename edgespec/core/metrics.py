"""Metrics of a generation from its Steps. Tokens and times are counted nowhere else."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import numpy.typing as npt

from edgespec.core.protocols import PrefillProgress, Step


@dataclass(frozen=True, slots=True)
class Metrics:
    """Counts and seconds of one generation; None for a figure that needs more tokens than were emitted.

    target_forwards    decode forwards of the target; the first token comes from prefill and needs none
    tau                mean tokens emitted per target forward, the first token excluded; 1.0 for plain decoding
    acceptance_rate    accepted_tokens / drafted_tokens
    alpha_by_depth     accepted / tested at draft depth 1, 2, ...; depths after a rejection are not tested
    tokens_per_second  1 / tpot_s
    speedup            tokens_per_second over that of plain decoding with the same peers, see SpeedupEstimate; None
                       if that is unknown, if nothing was drafted, and for fewer than 32 tokens
    cached_tokens      prompt tokens that were cached before
    reasoning_tokens   emitted tokens of the reasoning phase
    ttft_s             request to first token
    tpot_s             first token to last, per token after the first
    step_p50_s, step_p99_s   gaps between steps
    prefill_s          request to the scores of the last prompt token
    draft_s, verify_s, sample_s, commit_s   sums over the steps, see Step
    """

    prompt_tokens: int
    emitted_tokens: int
    target_forwards: int
    drafted_tokens: int
    accepted_tokens: int
    tau: float | None
    acceptance_rate: float | None
    alpha_by_depth: tuple[float, ...]
    tokens_per_second: float | None
    ttft_s: float | None
    tpot_s: float | None
    step_p50_s: float | None
    step_p99_s: float | None
    prefill_s: float
    draft_s: float
    verify_s: float
    sample_s: float
    commit_s: float
    speedup: float | None
    cached_tokens: int
    reasoning_tokens: int


_MIN_COMPARED = 32  # emitted tokens of an answer that is worth comparing with plain decoding
_RECENT_PLAIN = 5  # plain rounds that a drafted one is compared with
_MIN_PLAIN = 3  # fewer are not compared with
_CURVE_WEIGHT = 20  # weight of the measured curve, as a number of drafted rounds that were compared
_MAX_ERROR = 1.5  # factor by which the curve may be wrong; a comparison beyond it shows that the machine has changed
_RECENT_STEPS = 16  # steps that the current speed is averaged over


class SpeedupEstimate:
    """Estimates the speed of one answer over that of plain decoding, from the answer's own rounds.

    A round without a draft is a plain step, and drafting took the rest of its time. A round with a draft is as many
    plain steps as the measured curve says of its rows (`Step.plain_steps`), corrected by the plain rounds just before
    it. So a machine that is busy for a while slows down both sides of the ratio, which is

        tau * rounds / plain steps * (1 - share of the time in drafting)

    A forward with a draft counts as one plain step at least, so the estimate is at most tau * (1 - share).
    """

    def __init__(self) -> None:
        self._at_s: float | None = None
        self._seconds = self._drafting_s = 0.0
        self._tokens = self._n_plain = self._n_drafted = self._n_unknown = 0
        self._steps = 0.0  # plain steps of the drafted rounds, by the curve
        self._plain: deque[float] = deque(maxlen=_RECENT_PLAIN)  # seconds of the latest plain rounds
        self._compared: list[float] = []  # drafted rounds over recent plain ones, as multiples of the curve

    def add(self, step: Step) -> None:
        """Adds the next step of the answer, the first one included."""
        if self._at_s is not None:
            gap_s = step.at_s - self._at_s
            self._seconds += gap_s
            self._drafting_s += step.draft_s
            self._tokens += len(step.tokens)
            self._add_round(step, gap_s - step.draft_s)
        self._at_s = step.at_s

    def _add_round(self, step: Step, seconds: float) -> None:
        if not step.n_drafted:
            self._n_plain += 1
            self._plain.append(seconds)
            return
        self._n_drafted += 1
        self._n_unknown += step.plain_steps is None
        steps = step.plain_steps or 1.0
        self._steps += steps
        if len(self._plain) >= _MIN_PLAIN and (usual_s := median(self._plain)) > 0:
            multiple = seconds / usual_s / steps
            if step.plain_steps is not None:
                multiple = min(max(multiple, 1 / _MAX_ERROR), _MAX_ERROR)
            self._compared.append(multiple)

    @property
    def speedup(self) -> float | None:
        """None before the second step, and while the cost of a drafted round is unknown."""
        n = len(self._compared)
        if self._seconds <= 0 or (self._n_unknown and n < _MIN_PLAIN):
            return None
        weight = n / (n + (0 if self._n_unknown else _CURVE_WEIGHT)) if n else 0.0
        steps = self._steps * (max(median(self._compared), 0.0) ** weight if n else 1.0)
        steps = self._n_plain + max(steps, self._n_drafted)
        return self._tokens / steps * max(0.0, 1 - self._drafting_s / self._seconds)


@dataclass(frozen=True, slots=True)
class Reading:
    """How far a prompt has been read.

    progress  its tokens that are in the cache, and all
    seconds   since the request
    speed     tokens/s of the last parts; None before two of them were read
    """

    progress: PrefillProgress
    seconds: float
    speed: float | None

    @property
    def left_s(self) -> float | None:
        """Seconds until the prompt has been read; None while the speed is unknown."""
        return (self.progress.total - self.progress.done) / self.speed if self.speed else None

    def __str__(self) -> str:
        """How much of it, how fast, and how long it will take."""
        parts = [f"{self.progress.done:,} of {self.progress.total:,} tokens"]
        if self.speed is not None and self.left_s is not None:
            parts += [f"{self.speed:,.0f} tokens/s", f"{self.left_s:.0f} s left"]
        return ", ".join(parts)


_RECENT_PARTS = 5


class ReadingClock:
    """Measures how fast the last parts of a prompt were read: later ones take longer, and nobody knows when the first
    was begun.
    """

    def __init__(self, started_s: float) -> None:
        """`started_s` is time.perf_counter() when the request was made."""
        self._started_s = started_s
        self._latest = deque[tuple[int, float]](maxlen=_RECENT_PARTS)

    def add(self, progress: PrefillProgress, at_s: float) -> Reading:
        """Another part was read at `at_s`, in seconds of time.perf_counter()."""
        self._latest.append((progress.done, at_s))
        done, first_s = self._latest[0]
        speed = (progress.done - done) / (at_s - first_s) if progress.done > done and at_s > first_s else None
        return Reading(progress, at_s - self._started_s, speed)


class Meter:
    """Counts one generation as its steps come: what a screen shows meanwhile, and `metrics` at any time.

    prompt_tokens  the number given, until a PrefillProgress says how many there are
    started_s      time.perf_counter() when the request arrived
    steps          all of them, the one of the first token included
    reading        how far the prompt has been read; None before the first part
    """

    def __init__(self, prompt_tokens: int = 0, started_s: float = 0.0) -> None:
        self.prompt_tokens = prompt_tokens
        self.started_s = started_s
        self.steps: list[Step] = []
        self.emitted_tokens = self.drafted_tokens = self.accepted_tokens = 0
        self.reading: Reading | None = None
        self._clock = ReadingClock(started_s)
        self._speedup = SpeedupEstimate()
        self._reasoning = 0
        self._read_s: float | None = None

    def add_progress(self, progress: PrefillProgress, at_s: float) -> None:
        """Tokens of the prompt were read at `at_s`, in seconds of time.perf_counter()."""
        self.prompt_tokens, self._read_s = progress.total, at_s
        self.reading = self._clock.add(progress, at_s)

    def add(self, step: Step, reasoning: int = 0) -> None:
        """Add the next step; `reasoning` of its tokens belong to the reasoning phase."""
        self.steps.append(step)
        self.emitted_tokens += len(step.tokens)
        self.drafted_tokens += step.n_drafted
        self.accepted_tokens += step.n_accepted
        self._reasoning += reasoning
        self._speedup.add(step)

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over drafted tokens; None before the first draft."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else None

    @property
    def tokens_per_second(self) -> float | None:
        """The mean since the first token."""
        seconds = self.steps[-1].at_s - self.steps[0].at_s if self.steps else 0.0
        return (self.emitted_tokens - 1) / seconds if seconds > 0 and self.emitted_tokens > 1 else None

    @property
    def speedup(self) -> float | None:
        """The speed over that of plain decoding, see SpeedupEstimate; None while it is unknown, if nothing was
        drafted, and for fewer than 32 tokens.
        """
        return self._speedup.speedup if self.drafted_tokens and self.emitted_tokens >= _MIN_COMPARED else None

    @property
    def plain_tokens_per_second(self) -> float | None:
        """The speed that plain decoding would have had in this answer; None while it is unknown."""
        speed, speedup = self.tokens_per_second, self._speedup.speedup
        return speed / speedup if speed and speedup else None

    def recent_speed(self, end: int | None = None) -> float | None:
        """Tokens/s over the last steps, or over those before index `end` of `steps`."""
        steps = self.steps[:end][-_RECENT_STEPS:]
        seconds = steps[-1].at_s - steps[0].at_s if steps else 0.0
        return sum(len(step.tokens) for step in steps[1:]) / seconds if seconds > 0 else None

    def metrics(self) -> Metrics:
        steps, speed = self.steps, self.tokens_per_second
        forwards = max(0, len(steps) - 1)
        gaps = np.diff([s.at_s for s in steps])
        p50_s, p99_s = _find_percentiles(gaps, 0.5, 0.99) if len(gaps) else (None, None)
        return Metrics(
            prompt_tokens=self.prompt_tokens,
            emitted_tokens=self.emitted_tokens,
            target_forwards=forwards,
            drafted_tokens=self.drafted_tokens,
            accepted_tokens=self.accepted_tokens,
            tau=(self.emitted_tokens - 1) / forwards if forwards else None,
            acceptance_rate=self.acceptance_rate,
            alpha_by_depth=_alpha_by_depth(steps),
            tokens_per_second=speed,
            ttft_s=steps[0].at_s - self.started_s if steps else None,
            tpot_s=1 / speed if speed else None,
            step_p50_s=p50_s,
            step_p99_s=p99_s,
            prefill_s=self._prefill_s(),
            draft_s=sum(s.draft_s for s in steps),
            verify_s=sum(s.verify_s for s in steps),
            sample_s=sum(s.sample_s for s in steps),
            commit_s=sum(s.commit_s for s in steps),
            speedup=self.speedup,
            cached_tokens=self.reading.progress.reused if self.reading else 0,
            reasoning_tokens=self._reasoning,
        )

    def _prefill_s(self) -> float:
        if self.steps:
            return self.steps[0].at_s - self.steps[0].sample_s - self.started_s
        return self._read_s - self.started_s if self._read_s is not None else 0.0


def _alpha_by_depth(steps: Sequence[Step]) -> tuple[float, ...]:
    deepest = max((s.n_tested for s in steps), default=0)
    tested = [sum(s.n_tested > d for s in steps) for d in range(deepest)]
    accepted = [sum(s.n_accepted > d for s in steps) for d in range(deepest)]
    return tuple(a / t for a, t in zip(accepted, tested, strict=True))


def _find_percentiles(values: npt.NDArray[np.float64], *shares: float) -> list[float]:
    """Values below which these shares of all lie, linear between neighbours.

    np.percentile imports numpy.ma for this, which takes as long as a few tokens.
    """
    last = len(values) - 1
    found: list[float] = np.interp([share * last for share in shares], np.arange(last + 1), np.sort(values)).tolist()
    return found
