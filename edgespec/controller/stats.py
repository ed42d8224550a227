"""Statistics of a target and its drafters: costs, acceptance, the gain of rounds that asked a drafter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import asdict, replace
from typing import Any

from edgespec.controller.acceptance import (
    AcceptanceRecord,
    DecayedMean,
    make_acceptance_model,
)
from edgespec.controller.cost_model import CostModel, DraftCost, Profile
from edgespec.core.drafter import Confidence, Drafter

PHASES = ("answer", "reasoning")
_MIN_TESTED = 12.0  # tested tokens, discounted, before a warning about a drafter
_MIN_ACCEPTANCE = 0.05  # below it a draft model probably does not belong to the target
_EXPLORED_SHARE = 0.003  # of the time, for rounds that measure drafters which do not pay
_MAX_OUTLIER = 2.0  # limit of one decision's time, as a multiple of the usual one
_WEIGHT, _WEIGHT_BELOW = 0.05, 0.3  # of a new time in the usual one, and of a shorter one
_MAX_CREDIT = 1.0  # plain steps that are saved for such rounds


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
        """Spend `steps` if the budget allows; whether it does."""
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
        self.seconds = float(seconds)

    def observe(self, seconds: float) -> None:
        """A decision took `seconds`. Slower ones weigh less: the machine may be busy, and the first ones are slow."""
        usual = self.seconds or seconds
        excess = min(seconds, _MAX_OUTLIER * usual) - usual
        self.seconds = usual + (_WEIGHT if excess > 0 else _WEIGHT_BELOW) * excess


class DrafterStats:
    """Statistics of one drafter under one sampling method, in one phase."""

    def __init__(self, confidence: Confidence, *, is_trusted: bool = True) -> None:
        """`is_trusted`: whether it is expected to pay before it was ever asked."""
        self.confidence = confidence
        self.is_trusted = is_trusted
        self.acceptance = make_acceptance_model(confidence)
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
        """Statistics for a new text, see DecayedMean."""
        local = copy(self)
        local.accepted = local.tested = 0
        local.acceptance = self.acceptance.fork()
        local.first_choice = self.first_choice.fork()
        local.gains = [rate.fork() for rate in self.gains]
        return local

    def merge(self, text: DrafterStats) -> None:
        """Take in `text`, made by `fork`."""
        for rate, seen in zip(self.rates, text.rates, strict=True):
            rate.merge(seen)

    def warning(self, name: str) -> str | None:
        """A sentence for the user if the acceptance of the drafter `name` suggests a fault; else None."""
        accepted, tested = self.first_choice.evidence
        if tested >= _MIN_TESTED and accepted < _MIN_ACCEPTANCE * tested:
            return (
                f"The target accepts {accepted / tested:.0%} of the tokens of the drafter {name}: it may not belong to "
                "this model, or a file is damaged."
            )
        local, evidence = self.first_choice.local
        if evidence >= _MIN_TESTED and local < self.first_choice.prior / 2:
            return (
                f"The target accepts {local:.0%} of the tokens of the drafter {name}, {self.first_choice.prior:.0%} in "
                "earlier texts: it may not know this language or subject."
            )
        return None


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

    def to_dict(self) -> dict[str, Any]:
        """JSON values for `from_dict`."""
        profile = self.costs.profile
        return {
            **_profile_to_dict(profile),
            "longer": {str(context): _profile_to_dict(each) for context, each in profile.longer.items()},
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
        """Raises ValueError for values that `to_dict` cannot have returned."""
        try:
            longer = {int(context): _profile_from_dict(each) for context, each in state["longer"].items()}
            stats = DraftStats(replace(_profile_from_dict(state), longer=longer))
            for key, each in state["drafters"].items():
                if each["confidence"] not in ("probability", "length"):
                    raise ValueError("no such kind of confidence")
                found = stats.drafter(key, each["confidence"], is_trusted=bool(each["is_trusted"]))
                _restore(found.rates, each["rates"])
                _check_shares([found.first_choice, *found.acceptance.rates])
            stats.records = {name: AcceptanceRecord(**each) for name, each in state.get("records", {}).items()}
            stats.decision_time = DecisionTime(state.get("deciding_s", 0.0))
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError("not the statistics of drafters") from error
        return stats


class TextStats:
    """Statistics of one text, by phase: they start from an engine's and are merged into them when the text ends."""

    def __init__(self, stats: DraftStats, sampling: str) -> None:
        """`sampling` names a way of sampling."""
        self._shared = stats
        self._sampling = sampling
        self._phase = "answer"
        self._drafters: dict[str, DrafterStats] = {}
        self._present: dict[str, DrafterStats] = {}  # of this phase, by the drafter's name

    @property
    def exploration(self) -> ExplorationBudget:
        """Shared by all texts."""
        return self._shared.exploration

    def set_phase(self, phase: str) -> None:
        """One of PHASES."""
        self._phase, self._present = phase, {}

    def drafter(self, drafter: Drafter) -> DrafterStats:
        """Return the statistics of this phase. Call it before `rate` for every drafter that may vote."""
        found = self._present.get(drafter.name)
        if found is None:
            key = self._key(drafter.name)
            if key not in self._drafters:
                # Of several drafters that take time only the first is trusted: the others are measured by trials.
                is_trusted = not drafter.is_free and not any(each.is_trusted for each in self._present.values())
                self._drafters[key] = self._shared.drafter(key, drafter.confidence, is_trusted=is_trusted).fork()
            found = self._present[drafter.name] = self._drafters[key]
        return found

    def rate(self, votes: dict[str, float]) -> float:
        """The probability that a token with these votes is accepted if the one before it is.

        Drafters that propose the same token may have the same reason: the highest of their rates counts.
        """
        present = self._present
        return max([present[name].acceptance.rate(confidence) for name, confidence in votes.items()])

    def merge(self) -> None:
        """The text is complete, or its generation has ended."""
        counts: dict[str, tuple[int, int]] = {}
        for key, stats in self._drafters.items():
            self._shared.drafter(key, stats.confidence).merge(stats)
            name = key.partition("; ")[0]
            accepted, tested = counts.get(name, (0, 0))
            counts[name] = accepted + stats.accepted, tested + stats.tested
        for name, (accepted, tested) in counts.items():
            if tested:
                record = self._shared.records.get(name, AcceptanceRecord())
                self._shared.records[name] = record.add(accepted, tested)

    def _key(self, name: str) -> str:
        return f"{name}; {self._sampling}, {self._phase}"


def _profile_to_dict(profile: Profile) -> dict[str, Any]:
    """JSON values of a profile without its longer contexts."""
    return {
        "rows": {str(rows): seconds for rows, seconds in profile.rows.items()},
        "drafts": {
            name: {"units": {str(n): s for n, s in cost.units.items()}, "read_s": cost.read_s, "varies": cost.varies}
            for name, cost in profile.drafts.items()
        },
    }


def _profile_from_dict(state: dict[str, Any]) -> Profile:
    drafts = {
        name: DraftCost(_by_number(each["units"]), each["read_s"], bool(each["varies"]))
        for name, each in state["drafts"].items()
    }
    return Profile(_by_number(state["rows"]), drafts)


def _by_number(values: dict[str, Any]) -> dict[int, float]:
    return {int(n): float(value) for n, value in values.items()}


def _check_shares(rates: Sequence[DecayedMean]) -> None:
    if not all(0 <= total <= weight * (1 + 1e-9) for total, weight in (rate.evidence for rate in rates)):
        raise ValueError("more tokens accepted than tested")


def _restore(rates: Sequence[DecayedMean], evidence: Sequence[tuple[float, float]]) -> None:
    for rate, (total, weight) in zip(rates, evidence, strict=True):
        if not (math.isfinite(total) and 0 <= weight < 1e6):
            raise ValueError("not a sum and a weight")
        rate.restore((float(total), float(weight)))
