"""Statistics of a target and its drafters: costs, acceptance, the gain of rounds that asked the draft model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.controller.acceptance import AcceptanceModel, model_by_match_length, model_by_probability
from edgespec.controller.cost_model import CostModel, Profile
from edgespec.controller.estimator import DecayedMean
from edgespec.core.protocols import Step
from edgespec.drafters.draft_model import Candidates

PHASES = ("answer", "reasoning")
_MIN_TESTED = 12.0  # tested tokens, discounted, before a warning about a draft model
_MIN_ACCEPTANCE = 0.05  # below it the draft model probably does not belong to the target
_EXPLORED_SHARE = 0.003  # of the time, for rounds that re-measure a draft model that does not pay


@dataclass
class ExplorationBudget:
    """Plain steps since a draft model was last expected to pay: of all rounds, and of those that re-measured it."""

    elapsed: float = 0.0
    spent: float = 0.0

    def reset(self) -> None:
        self.elapsed = self.spent = 0.0

    def spend(self, steps: float) -> bool:
        """Spend `steps` if the budget allows; whether it does."""
        if self.spent + steps > _EXPLORED_SHARE * self.elapsed:
            return False
        self.spent += steps
        return True


class ModelStats:
    """Statistics of a draft model under one sampling method, in one phase."""

    def __init__(self) -> None:
        self.acceptance = model_by_probability()
        self.first_choice = DecayedMean(0.6, 0.95)  # acceptance of the first candidate on an accepted path
        # Value of a round with the draft model less that of one without, in tokens: for 0, 1, 2-3, 4-7, 8 or more
        # peers, which wait while it drafts.
        self.gains = [DecayedMean(guess, 0.97) for guess in (0.2, 0.0, 0.0, 0.0, 0.0)]
        self.exploration = ExplorationBudget()

    @property
    def rates(self) -> list[DecayedMean]:
        return [self.first_choice, *self.gains, *self.acceptance.rates]

    def gain(self, n_peers: int) -> DecayedMean:
        """The gain of a round that shares its forward with `n_peers` other generations."""
        return self.gains[min(n_peers.bit_length(), len(self.gains) - 1)]

    def observe_path(self, path: Sequence[Candidates], step: Step) -> None:
        """Compare the candidates at each depth of a drafted path with the emitted tokens.

        Candidates after the first rejection were proposed for another prefix and are not counted.
        """
        for depth, (candidates, emitted) in enumerate(zip(path, step.tokens, strict=False)):
            if candidates.q is None:
                for token, probability in zip(candidates.tokens, candidates.probabilities, strict=True):
                    self.acceptance.observe(probability, token == emitted)
                is_right = candidates.tokens[0] == emitted
            elif depth < step.n_tested:
                is_right = depth < step.n_accepted
                self.acceptance.observe(candidates.probabilities[0], is_right)
            else:
                break
            self.first_choice.observe(float(is_right))
            if not is_right:
                break

    def fork(self) -> ModelStats:
        """See DecayedMean.fork."""
        local = ModelStats()
        local.acceptance = self.acceptance.fork()
        local.first_choice = self.first_choice.fork()
        local.gains = [rate.fork() for rate in self.gains]
        local.exploration = self.exploration  # shared by all texts
        return local

    def merge(self, text: ModelStats) -> None:
        """See DecayedMean.merge."""
        for rate, seen in zip(self.rates, text.rates, strict=True):
            rate.merge(seen)

    def warning(self) -> str | None:
        """A sentence for the user if the draft model's acceptance suggests a fault; else None."""
        accepted, tested = self.first_choice.evidence
        if tested >= _MIN_TESTED and accepted < _MIN_ACCEPTANCE * tested:
            return (
                f"The target accepts {accepted / tested:.0%} of the draft model's tokens: it may not belong to this "
                "model, or one of the two files is damaged."
            )
        local, evidence = self.first_choice.local
        if evidence >= _MIN_TESTED and local < self.first_choice.prior / 2:
            return (
                f"The target accepts {local:.0%} of the draft model's tokens, {self.first_choice.prior:.0%} in earlier "
                "texts: the draft model may not know this language or subject."
            )
        return None


class DraftStats:
    """Statistics of an engine; they outlive its generations."""

    def __init__(self, profile: Profile) -> None:
        self.costs = CostModel(profile)
        self.matches: dict[str, AcceptanceModel] = {}
        self.models: dict[str, ModelStats] = {}

    def lookup(self, sampling: str) -> AcceptanceModel:
        """Acceptance of lookups by match length; `sampling` names a sampling method."""
        return self.matches.setdefault(sampling, model_by_match_length())

    def model(self, sampling: str) -> ModelStats:
        """Statistics of the draft model; `sampling` names a sampling method."""
        return self.models.setdefault(sampling, ModelStats())

    def to_dict(self) -> dict[str, Any]:
        """JSON values for `from_dict`."""
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
        """Raises ValueError for values that `to_dict` cannot have returned."""
        try:
            rows = {int(rows): float(seconds) for rows, seconds in state["rows"].items()}
            stats = DraftStats(Profile(rows, state["draft_s"], state["read_s"]))
            for name, evidence in state["matches"].items():
                matches = stats.lookup(name)
                _restore(matches.rates, evidence)
                _check_shares(matches.rates)
            for name, evidence in state["models"].items():
                model = stats.model(name)
                _restore(model.rates, evidence)
                _check_shares([model.first_choice, *model.acceptance.rates])
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError("not the statistics of a draft") from error
        return stats


class TextStats:
    """Statistics of one text, by phase: they start from an engine's and are merged into them when the text ends."""

    def __init__(self, stats: DraftStats, sampling: str) -> None:
        self._shared = {
            phase: (stats.lookup(f"{sampling}, {phase}"), stats.model(f"{sampling}, {phase}")) for phase in PHASES
        }
        self._local = {phase: (lookup.fork(), model.fork()) for phase, (lookup, model) in self._shared.items()}
        self.lookup, self.model = self._local["answer"]

    def set_phase(self, phase: str) -> None:
        self.lookup, self.model = self._local[phase]

    def merge(self) -> None:
        """The text is complete, or its generation has ended."""
        for phase, (lookup, model) in self._shared.items():
            local_lookup, local_model = self._local[phase]
            lookup.merge(local_lookup)
            model.merge(local_model)


def _check_shares(rates: Sequence[DecayedMean]) -> None:
    if not all(0 <= total <= weight * (1 + 1e-9) for total, weight in (rate.evidence for rate in rates)):
        raise ValueError("more tokens accepted than tested")


def _restore(rates: Sequence[DecayedMean], evidence: Sequence[tuple[float, float]]) -> None:
    for rate, (total, weight) in zip(rates, evidence, strict=True):
        if not (math.isfinite(total) and 0 <= weight < 1e6):
            raise ValueError("not a sum and a weight")
        rate.restore((float(total), float(weight)))
