"""What the instruments show, computed from steps alone; no widgets."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from edgespec.core.protocols import Decision, PrefillProgress, Step

_LATELY = 16  # rounds that the present speed is taken over
_HISTORY = 60  # rounds of a sparkline
_ROUNDS = 400  # kept for the details


@dataclass
class LiveStats:
    """One generation as it goes on. Speeds in tokens a second; `plain` is what plain decoding is known to do here."""

    plain: float | None = None
    asked_s: float = 0.0
    ttft_s: float | None = None
    context_used: int = 0  # tokens
    prefill: PrefillProgress | None = None
    rounds: deque[Step] = field(default_factory=lambda: deque(maxlen=_ROUNDS))
    speeds: deque[float] = field(default_factory=lambda: deque(maxlen=_HISTORY))
    accepted_shares: deque[float] = field(default_factory=lambda: deque(maxlen=_HISTORY))
    taus: deque[float] = field(default_factory=lambda: deque(maxlen=_HISTORY))  # tokens of each round
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    forwards: int = 0
    began_s: float | None = None
    draft_s: float = 0.0
    verify_s: float = 0.0
    other_s: float = 0.0
    plain_s: float = 0.0  # what the tokens after the first would have taken
    decision: Decision | None = None
    _tested: list[int] = field(default_factory=list)
    _right: list[int] = field(default_factory=list)

    def add(self, step: Step) -> None:
        """The next round of the generation."""
        if self.began_s is None:
            self.began_s = step.at_s
            self.ttft_s = step.at_s - self.asked_s
        self.tokens += len(step.tokens)
        self.context_used += len(step.tokens)
        if step.index == 0:
            return
        self.forwards += 1
        self.drafted += step.n_drafted
        self.accepted += step.n_accepted
        self.draft_s += step.draft_s
        self.verify_s += step.verify_s
        self.other_s += step.sample_s + step.commit_s
        self.decision = step.decision
        if step.plain_s:  # beside a screen to draw, plain decoding is slower than what was measured on load
            self.plain_s += step.plain_s * len(step.tokens)
            self.plain = (self.tokens - 1) / self.plain_s
        for depth in range(step.n_tested):
            if depth == len(self._tested):
                self._tested.append(0)
                self._right.append(0)
            self._tested[depth] += 1
            self._right[depth] += depth < step.n_accepted
        self.rounds.append(step)
        self.speeds.append(self.now or 0.0)
        self.taus.append(float(len(step.tokens)))
        if step.n_drafted:
            self.accepted_shares.append(step.n_accepted / step.n_drafted)

    def read(self, progress: PrefillProgress) -> None:
        """How far the prompt has been read."""
        self.prefill = progress
        self.context_used = progress.total

    @property
    def reading(self) -> tuple[str | None, float]:
        """What the progress line says: nothing once the first token has come."""
        if self.prefill is None or self.began_s is not None:
            return None, 0.0
        return f"reading {self.prefill.total:,} tokens", self.prefill.done / max(1, self.prefill.total)

    @property
    def now(self) -> float | None:
        """Speed of the last rounds."""
        return _speed(list(self.rounds)[-_LATELY:])

    @property
    def mean(self) -> float | None:
        """Speed since the first token."""
        if self.began_s is None or not self.rounds or self.rounds[-1].at_s <= self.began_s:
            return None
        return (self.tokens - 1) / (self.rounds[-1].at_s - self.began_s)

    @property
    def times_plain(self) -> float | None:
        return self.mean / self.plain if self.mean and self.plain and self.plain_s else None

    @property
    def acceptance(self) -> float | None:
        return self.accepted / self.drafted if self.drafted else None

    @property
    def tau(self) -> float | None:
        """Tokens a round."""
        return (self.tokens - 1) / self.forwards if self.forwards else None

    @property
    def alphas(self) -> list[float]:
        """Share of tested drafted tokens that were right, by depth."""
        return [right / tested for right, tested in zip(self._right, self._tested, strict=True)]

    @property
    def shares(self) -> tuple[float, float, float]:
        """Of the time: drafting, the target's forwards, the rest."""
        total = self.draft_s + self.verify_s + self.other_s
        return (self.draft_s / total, self.verify_s / total, self.other_s / total) if total else (0.0, 0.0, 0.0)


def _speed(steps: Sequence[Step]) -> float | None:
    took = steps[-1].at_s - steps[0].at_s if len(steps) > 1 else 0.0
    return sum(len(step.tokens) for step in steps[1:]) / took if took > 0 else None


def bar(share: float, width: int) -> str:
    """A horizontal bar of eighths of a cell."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    full, part = divmod(eighths, 8)
    return ("█" * full + (" ▏▎▍▌▋▊▉"[part] if part else "")).ljust(width)


def column(share: float) -> str:
    """A vertical bar of one cell."""
    return "▁▂▃▄▅▆▇█"[round(max(0.0, min(1.0, share)) * 7)]
