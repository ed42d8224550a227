"""Statistics of a target and its drafters: costs, acceptance, the gain of rounds that asked a drafter."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import asdict, replace
from statistics import median_low
from typing import Any

from edgespec.autopilot.acceptance import AcceptanceModel
from edgespec.autopilot.acceptance_record import AcceptanceRecord
from edgespec.autopilot.cost_model import CostModel
from edgespec.autopilot.decayed_mean import DecayedMean
from edgespec.autopilot.profile import DraftCost, Profile
from edgespec.core.drafter import Confidence, Drafter

_EXPLORED_SHARE = 0.003  # share of the time for rounds that measure drafters which do not pay
_N_RECENT = 15  # latest decisions whose median is the usual time
_MAX_CREDIT = 1.0  # plain steps that are saved for a round which measures a drafter


class ExplorationBudget:
    """Plain steps for rounds that measure a drafter which is not expected to pay; all drafters share them."""

    def __init__(self) -> None:
        self._credit = 4.0

    def add(self, steps: float) -> None:
        """Rounds took `steps` plain steps."""
        self._credit += _EXPLORED_SHARE * steps

    def charge(self, steps: float) -> None:
        """A round that measured a drafter has lost `steps` plain steps."""
        self._credit -= steps

    def reset(self) -> None:
        """The only drafter pays, so that nothing has to be measured."""
        self._credit = min(self._credit, 0.0)

    def spend(self, steps: float) -> bool:
        """Spend `steps` if the budget allows; returns whether it does."""
        self._credit = min(self._credit, max(steps, _MAX_CREDIT))
        is_allowed = steps <= self._credit
        self._credit -= steps * is_allowed
        return is_allowed


class DecisionTime:
    """Usual seconds of a decision of the autopilot that asks no drafter which takes time; shared by all texts."""

    def __init__(self, seconds: float = 0.0) -> None:
        """Raises ValueError unless `seconds` is a length of time; 0: not measured yet."""
        if not (math.isfinite(seconds) and seconds >= 0):
            raise ValueError("not a length of time")
        self._recent = deque([seconds] if seconds else [], maxlen=_N_RECENT)
        self.seconds = float(seconds)

    def observe(self, seconds: float) -> None:
        """A decision took `seconds`. The median leaves out the first ones, which are slow, and busy moments."""
        self._recent.append(seconds)
        self.seconds = median_low(self._recent)


class DrafterStats:
    """Statistics of one drafter under one sampling method, in one phase."""

    def __init__(self, confidence: Confidence, *, is_trusted: bool = True) -> None:
        """`is_trusted`: whether it is expected to pay before it was ever asked."""
        self.confidence = confidence
        self.is_trusted = is_trusted
        self.acceptance = AcceptanceModel(confidence)
        self.first_choice = DecayedMean(0.6, 0.95)  # acceptance of the best proposal on an accepted path
        self.accepted = self.tested = 0  # of such proposals in the present text
        # Value of a round with the drafter less that of one without, in tokens: for 0, 1, 2-3, 4-7, 8 or more peers,
        # which wait while it drafts.
        self.gains = [DecayedMean(guess, 0.97) for guess in (0.2 * is_trusted, 0.0, 0.0, 0.0, 0.0)]

    @property
    def rates(self) -> list[DecayedMean]:
        return [self.first_choice, *self.gains, *self.acceptance.rates]

    def gain(self, n_peers: int) -> DecayedMean:
        """The gain of a round that shares its forward with `n_peers` other generations."""
        return self.gains[min(n_peers.bit_length(), len(self.gains) - 1)]

    def observe_choice(self, is_right: bool) -> None:
        """The best proposal on an accepted path was compared."""
        self.first_choice.observe(float(is_right))
        self.accepted += is_right
        self.tested += 1

    def fork(self) -> DrafterStats:
        """Statistics for a new text. Several may exist at a time; `merge` takes in what one has observed."""
        local = DrafterStats(self.confidence, is_trusted=self.is_trusted)
        for rate, known in zip(local.rates, self.rates, strict=True):
            rate.restore(known.evidence)
        return local

    def merge(self, text: DrafterStats) -> None:
        """Take in `text`, made by `fork`."""
        for rate, seen in zip(self.rates, text.rates, strict=True):
            rate.merge(seen)


class DraftStats:
    """Statistics of an engine; they outlive its generations.

    drafters    by '<drafter>; <way of sampling>, <phase>'
    records     by drafter, whatever the way of sampling and the phase
    """

    def __init__(self, profile: Profile) -> None:
        self.costs = CostModel(profile)
        self.exploration = ExplorationBudget()
        self.decision_time = DecisionTime()
        self.drafters: dict[str, DrafterStats] = {}
        self.records: dict[str, AcceptanceRecord] = {}

    def drafter(self, key: str, confidence: Confidence, *, is_trusted: bool = True) -> DrafterStats:
        """The statistics under `key`. Those of another kind of confidence are dropped."""
        found = self.drafters.get(key)
        if found is None or found.confidence != confidence:
            found = self.drafters[key] = DrafterStats(confidence, is_trusted=is_trusted)
        return found

    def with_costs(self, profile: Profile) -> DraftStats:
        """New statistics with the costs of `profile`. They keep the acceptance, but not the gains at the old costs."""
        stats = DraftStats(profile)
        for key, each in self.drafters.items():
            found = stats.drafter(key, each.confidence, is_trusted=each.is_trusted)
            for rate, known in zip(found.rates, each.rates, strict=True):
                if rate not in found.gains:
                    rate.restore(known.evidence)
        stats.records = dict(self.records)
        return stats

    def to_dict(self) -> dict[str, Any]:
        """Values for `from_dict`, which are JSON's but for numbers as keys; JSON makes them strings."""
        return {
            **asdict(self.costs.profile),
            "drafters": {
                key: {
                    "confidence": each.confidence,
                    "is_trusted": each.is_trusted,
                    "rates": [rate.evidence for rate in each.rates],
                }
                for key, each in self.drafters.items()
            },
            "records": {name: asdict(record) for name, record in self.records.items()},
            "deciding_s": self.decision_time.seconds,
        }

    @staticmethod
    def from_dict(state: dict[str, Any]) -> DraftStats:
        """Raises ValueError, TypeError, AttributeError or LookupError for what `to_dict` cannot have returned."""
        longer = {int(context): _read_profile(each) for context, each in state["longer"].items()}
        stats = DraftStats(replace(_read_profile(state), longer=longer))
        for key, each in state["drafters"].items():
            found = stats.drafter(key, each["confidence"], is_trusted=bool(each["is_trusted"]))
            for rate, (total, weight) in zip(found.rates, each["rates"], strict=True):
                is_share = rate not in found.gains
                if not (math.isfinite(total) and 0 <= weight < 1e6) or (is_share and not 0 <= total <= weight + 1e-6):
                    raise ValueError("not the sum of observations and their weight")
                rate.restore((float(total), float(weight)))
        stats.records = {name: AcceptanceRecord(**each) for name, each in state.get("records", {}).items()}
        stats.decision_time = DecisionTime(state.get("deciding_s", 0.0))
        return stats


class TextStats:
    """Statistics of one text, by phase: they start from an engine's and are merged into them when the text ends."""

    def __init__(self, stats: DraftStats, sampling: str) -> None:
        """`sampling` names a way of sampling."""
        self.exploration = stats.exploration
        self._shared = stats
        self._sampling = sampling
        self._phases: dict[str, dict[str, DrafterStats]] = {}  # by phase, then by the drafter's name
        self.set_phase("answer")

    def set_phase(self, phase: str) -> None:
        """`answer` or `reasoning`."""
        self._phase, self._present = phase, self._phases.setdefault(phase, {})

    def drafter(self, drafter: Drafter) -> DrafterStats:
        """Return the statistics of this phase. Call it before `rate` for every drafter that may vote."""
        found = self._present.get(drafter.name)
        if found is None:
            # Of several drafters that take time only the first is trusted: the others are measured by trials.
            is_trusted = not drafter.is_free and not any(each.is_trusted for each in self._present.values())
            shared = self._share(drafter.name, self._phase, drafter.confidence, is_trusted=is_trusted)
            found = self._present[drafter.name] = shared.fork()
        return found

    def rate(self, votes: dict[str, float]) -> float:
        """The probability that a token with these votes is accepted if the one before it is.

        Drafters that propose the same token may have the same reason: the highest of their rates counts.
        """
        present = self._present
        return max([present[name].acceptance.rate(confidence) for name, confidence in votes.items()])

    def merge(self) -> None:
        """Merge these statistics into the engine's: the text is complete, or its generation has ended."""
        counts: dict[str, tuple[int, int]] = {}
        for phase, drafters in self._phases.items():
            for name, stats in drafters.items():
                self._share(name, phase, stats.confidence).merge(stats)
                accepted, tested = counts.get(name, (0, 0))
                counts[name] = accepted + stats.accepted, tested + stats.tested
        for name, (accepted, tested) in counts.items():
            if tested:
                self._shared.records[name] = self._shared.records.get(name, AcceptanceRecord()).add(accepted, tested)

    def _share(self, name: str, phase: str, confidence: Confidence, *, is_trusted: bool = True) -> DrafterStats:
        """The engine's statistics of a drafter."""
        return self._shared.drafter(f"{name}; {self._sampling}, {phase}", confidence, is_trusted=is_trusted)


def _read_profile(state: dict[str, Any]) -> Profile:
    """A profile without longer contexts, of JSON values."""
    drafts = {name: DraftCost(_by_number(each["units"]), each["read_s"]) for name, each in state["drafts"].items()}
    return Profile(_by_number(state["rows"]), drafts)


def _by_number(values: dict[str, Any]) -> dict[int, float]:
    return {int(n): float(value) for n, value in values.items()}
