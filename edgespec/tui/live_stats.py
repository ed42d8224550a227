"""Statistics of a generation while it runs, computed from its steps; no widgets."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from edgespec.core.metrics import SpeedupEstimate
from edgespec.core.protocols import PrefillProgress, Step

_RECENT_STEPS = 16  # that the current speed is averaged over
_HISTORY = 60  # steps that a sparkline is scaled by
_MAX_STEPS = 400  # kept for the details screen


@dataclass
class AcceptanceStats:
    """Drafted and accepted tokens, in total and by draft depth."""

    drafted: int = 0
    accepted: int = 0
    _tested_at: list[int] = field(default_factory=list)
    _accepted_at: list[int] = field(default_factory=list)

    def add(self, step: Step) -> None:
        self.drafted += step.n_drafted
        self.accepted += step.n_accepted
        for depth in range(step.n_tested):
            if depth == len(self._tested_at):
                self._tested_at.append(0)
                self._accepted_at.append(0)
            self._tested_at[depth] += 1
            self._accepted_at[depth] += depth < step.n_accepted

    @property
    def rate(self) -> float | None:
        """Accepted over drafted tokens; None before the first draft."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def by_depth(self) -> list[float]:
        """Accepted over tested tokens at depth 1, 2, ..."""
        return [accepted / tested for accepted, tested in zip(self._accepted_at, self._tested_at, strict=True)]


@dataclass
class PhaseTimes:
    """Seconds of decoding: drafting, forwards of the target, everything else."""

    draft_s: float = 0.0
    verify_s: float = 0.0
    other_s: float = 0.0

    def add(self, step: Step) -> None:
        self.draft_s += step.draft_s
        self.verify_s += step.verify_s
        self.other_s += step.sample_s + step.commit_s

    @property
    def shares(self) -> tuple[float, float, float]:
        """Each phase over their sum; zeros before the first step."""
        total = self.draft_s + self.verify_s + self.other_s
        return (self.draft_s / total, self.verify_s / total, self.other_s / total) if total else (0.0, 0.0, 0.0)


@dataclass
class LiveStats:
    """One generation. Speeds are in tokens/s.

    usual_plain_speed   of plain decoding, as measured on load
    requested_s         perf_counter() of the request
    context_used        tokens of the prompt and the answer
    steps               the latest decode steps, the oldest first
    speeds, acceptance_rates, taus   one value a step, for sparklines
    """

    usual_plain_speed: float | None = None
    requested_s: float = 0.0
    first_token_s: float | None = None
    context_used: int = 0
    prefill: PrefillProgress | None = None
    tokens: int = 0
    forwards: int = 0
    acceptance: AcceptanceStats = field(default_factory=AcceptanceStats)
    times: PhaseTimes = field(default_factory=PhaseTimes)
    steps: deque[Step] = field(default_factory=partial(deque, maxlen=_MAX_STEPS))
    speeds: deque[float] = field(default_factory=partial(deque, maxlen=_HISTORY))
    acceptance_rates: deque[float] = field(default_factory=partial(deque, maxlen=_HISTORY))
    taus: deque[float] = field(default_factory=partial(deque, maxlen=_HISTORY))
    _speedup: SpeedupEstimate = field(default_factory=SpeedupEstimate)

    def add(self, step: Step) -> None:
        """Count the next step. Step 0 is the prefill, which emits the first token."""
        if self.first_token_s is None:
            self.first_token_s = step.at_s
        self.tokens += len(step.tokens)
        self.context_used += len(step.tokens)
        self._speedup.add(step)
        if step.index == 0:
            return
        self.forwards += 1
        self.acceptance.add(step)
        self.times.add(step)
        self.steps.append(step)
        self.speeds.append(self.recent_speed or 0.0)
        self.taus.append(float(len(step.tokens)))
        if step.n_drafted:
            self.acceptance_rates.append(step.n_accepted / step.n_drafted)

    def add_prefill(self, progress: PrefillProgress) -> None:
        self.prefill = progress
        self.context_used = progress.total

    @property
    def prefill_status(self) -> tuple[str | None, float]:
        """Text and fraction for the progress line; no text before the prefill starts and after the first token."""
        if self.prefill is None or self.first_token_s is not None:
            return None, 0.0
        return f"reading {self.prefill.total:,} tokens", self.prefill.done / max(1, self.prefill.total)

    @property
    def ttft_s(self) -> float | None:
        """Request to first token."""
        return None if self.first_token_s is None else self.first_token_s - self.requested_s

    @property
    def recent_speed(self) -> float | None:
        """Speed over the last steps."""
        return _measure_speed(list(self.steps)[-_RECENT_STEPS:])

    @property
    def mean_speed(self) -> float | None:
        """Speed since the first token."""
        if self.first_token_s is None or not self.steps or self.steps[-1].at_s <= self.first_token_s:
            return None
        return (self.tokens - 1) / (self.steps[-1].at_s - self.first_token_s)

    @property
    def times_plain(self) -> float | None:
        """Mean speed over the estimated speed of plain decoding; None while that is unknown."""
        return self._speedup.speedup

    @property
    def plain_speed(self) -> float | None:
        """Speed of plain decoding in this answer, which `times_plain` compares with; before it, the usual one."""
        mean, gain = self.mean_speed, self.times_plain
        if mean and gain:
            return mean / gain
        return None if self.tokens else self.usual_plain_speed

    @property
    def tau(self) -> float | None:
        """Mean tokens emitted per target forward, the first token excluded."""
        return (self.tokens - 1) / self.forwards if self.forwards else None


def _measure_speed(steps: Sequence[Step]) -> float | None:
    elapsed_s = steps[-1].at_s - steps[0].at_s if len(steps) > 1 else 0.0
    return sum(len(step.tokens) for step in steps[1:]) / elapsed_s if elapsed_s > 0 else None
