"""What a request asks of a model's reasoning, and how it is followed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from edgespec.text.template_probe import TemplateProfile

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

_LEVELS = "reasoning_effort"
_NEAREST = {"minimal": "low", "xhigh": "high", "max": "high"}  # of the levels that chat templates know


@dataclass(frozen=True, slots=True)
class ThinkingPlan:
    """How a request for reasoning is followed.

    variables      of the chat template
    max_reasoning  tokens after which the reasoning is ended; None: no limit
    warnings       what is not followed, in sentences
    """

    variables: Mapping[str, Any] = field(default_factory=dict)
    max_reasoning: int | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Thinking:
    """What a request asks of the reasoning; None leaves it to the chat template.

    is_on   whether the model reasons; takes precedence over the others
    effort  how much; 'none' turns it off
    budget  tokens after which the reasoning is ended; 0 turns it off
    """

    is_on: bool | None = None
    effort: Effort | None = None
    budget: int | None = None

    @property
    def _wants(self) -> bool | None:
        """Whether the request turns the reasoning on or off."""
        if self.is_on is not None:
            return self.is_on
        if self.effort is not None:
            return self.effort != "none"
        return False if self.budget == 0 else None

    def plan(self, template: TemplateProfile) -> ThinkingPlan:
        """How the request is followed with a chat template. If reasoning shall be off and the template has no switch
        for it, `max_reasoning` is 0, which ends it at once.
        """
        wants = self._wants
        if template.reasoning is None:
            is_ignored = wants or bool(self.budget)
            return ThinkingPlan(warnings=("the model's chat template has no reasoning.",) if is_ignored else ())
        variables: dict[str, Any] = {}
        warnings: tuple[str, ...] = ()
        if wants is not None:
            variables = dict.fromkeys(template.switches, wants)
        if wants is False and template.can_level_off:
            variables[_LEVELS] = "none"
        if wants is not False and self.effort and self.effort != "none":
            if template.has_levels:
                variables[_LEVELS] = _NEAREST.get(self.effort, self.effort)
            else:
                warnings = ("the model's chat template has no levels of reasoning effort.",)
        limit = self.budget if variables or wants is not False else 0
        return ThinkingPlan(variables, limit, warnings)
