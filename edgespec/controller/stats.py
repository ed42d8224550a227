"""What is known of a target and its drafters: costs, acceptance, what rounds of the draft model have won."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.controller.acceptance import AcceptanceModel, of_match_length, of_probability
from edgespec.controller.cost_model import CostModel, Profile
from edgespec.controller.estimator import DecayedMean

_ENOUGH = 12.0  # tested tokens, discounted, before anything is said of a draft model
_HOPELESS = 0.05


@dataclass
class Trials:
    """Plain steps of all rounds since a draft model was last worth asking, and of its trials among them."""

    elapsed: float = 0.0
    tried: float = 0.0


class ModelRecord:
    """How a draft model has done under one way of sampling."""

    def __init__(self) -> None:
        self.calibration = of_probability()  # by the probability that the draft gives a token
        self.first_choice = DecayedMean(0.6, 0.95)  # of being right, where the tokens before it were
        # Of a round with it over one without, in tokens: alone, and beside 1, 2, 4, 8 other texts or more, where the
        # others wait while it drafts.
        self.advantages = [DecayedMean(guess, 0.97) for guess in (0.2, 0.0, 0.0, 0.0, 0.0)]
        self.trials = Trials()

    @property
    def rates(self) -> list[DecayedMean]:
        return [self.first_choice, *self.advantages, *self.calibration.rates]

    def advantage(self, beside: int) -> DecayedMean:
        """The one that holds beside so many other texts."""
        return self.advantages[min(beside.bit_length(), len(self.advantages) - 1)]

    def fork(self) -> ModelRecord:
        """See DecayedMean.begun."""
        local = ModelRecord()
        local.calibration = self.calibration.fork()
        local.first_choice = self.first_choice.fork()
        local.advantages = [rate.fork() for rate in self.advantages]
        local.trials = self.trials  # one account for all texts
        return local

    def merge(self, text: ModelRecord) -> None:
        """See DecayedMean.learn."""
        self.calibration.merge(text.calibration)
        self.first_choice.merge(text.first_choice)
        for rate, seen in zip(self.advantages, text.advantages, strict=True):
            rate.merge(seen)

    def warning(self) -> str | None:
        """What is wrong with the draft model, in a sentence for the user; None where nothing seems to be."""
        right, tested = self.first_choice.evidence
        if tested >= _ENOUGH and right < _HOPELESS * tested:
            return (
                f"The draft model is right about {right / tested:.0%} of its tokens: it may not belong to this model, "
                "or one of the two files is damaged."
            )
        local, evidence = self.first_choice.local
        if evidence >= _ENOUGH and local < self.first_choice.prior / 2:
            return (
                f"The draft model is right about {local:.0%} of its tokens, {self.first_choice.prior:.0%} in earlier "
                "texts: it may not know this language or subject."
            )
        return None


class DraftStats:
    """Belongs to an engine, and outlives its generations."""

    def __init__(self, profile: Profile) -> None:
        self.costs = CostModel(profile)
        self.matches: dict[str, AcceptanceModel] = {}
        self.models: dict[str, ModelRecord] = {}

    def lookup(self, sampling: str) -> AcceptanceModel:
        """How often lookups are right, by the length of the match; `sampling` names a way of sampling."""
        return self.matches.setdefault(sampling, of_match_length())

    def model(self, sampling: str) -> ModelRecord:
        return self.models.setdefault(sampling, ModelRecord())

    def to_dict(self) -> dict[str, Any]:
        """What outlives the process, for `from_dict`."""
        profile = self.costs.profile
        return {
            "rows": {str(rows): seconds for rows, seconds in profile.rows.items()},
            "draft_s": profile.draft_s,
            "read_s": profile.read_s,
            "matches": {name: [rate.evidence for rate in each.rates] for name, each in self.matches.items()},
            "models": {name: [rate.evidence for rate in each.rates] for name, each in self.models.items()},
        }

    @staticmethod
    def from_dict(state: dict[str, Any]) -> DraftStats:
        """Raises ValueError for what `to_dict` cannot have returned."""
        try:
            rows = {int(rows): float(seconds) for rows, seconds in state["rows"].items()}
            found = DraftStats(Profile(rows, state["draft_s"], state["read_s"]))
            for name, evidence in state["matches"].items():
                matches = found.lookup(name)
                _restore(matches.rates, evidence)
                _require_shares(matches.rates)
            for name, evidence in state["models"].items():
                model = found.model(name)
                _restore(model.rates, evidence)
                _require_shares([model.first_choice, *model.calibration.rates])
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError("no experience") from error
        return found


def _require_shares(rates: Sequence[DecayedMean]) -> None:
    if not all(0 <= total <= weight * (1 + 1e-9) for total, weight in (rate.evidence for rate in rates)):
        raise ValueError("more was right than was tested")


def _restore(rates: Sequence[DecayedMean], evidence: Sequence[tuple[float, float]]) -> None:
    for rate, (total, weight) in zip(rates, evidence, strict=True):
        if not (math.isfinite(total) and 0 <= weight < 1e6):
            raise ValueError("no evidence")
        rate.restore((float(total), float(weight)))
