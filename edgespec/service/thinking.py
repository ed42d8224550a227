"""What a request asks of the model's reasoning, and what becomes of it with the model's chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from edgespec.text.reasoning import detect_format

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

_SWITCHES = {  # variables of chat templates that turn the reasoning on and off, and how a template reads them
    "enable_thinking": re.compile(r"\benable_thinking\b"),
    "thinking": re.compile(r"\b(?:if|and|or|not)\s+thinking\b"),
}
_LEVELS = "reasoning_effort"
_LEVEL_OFF = re.compile(r"""['"]none['"]""")
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

    def plan(self, template: str | None) -> ThinkingPlan:
        """What becomes of it with a chat template. A template without a switch is followed by an answer whose reasoning
        is ended at once where it shall be off.
        """
        wants, source = self._wants, template or ""
        if detect_format(source) is None:
            is_ignored = wants or bool(self.budget)
            return ThinkingPlan(warnings=("the model's chat template has no reasoning.",) if is_ignored else ())
        variables, warnings = dict[str, Any](), list[str]()
        switches = [name for name, reads in _SWITCHES.items() if reads.search(source)]
        if wants is not None:
            variables |= dict.fromkeys(switches, wants)
        if wants is False:
            if _LEVELS in source and _LEVEL_OFF.search(source):
                variables[_LEVELS] = "none"
        elif self.effort is not None and self.effort != "none":
            if _LEVELS in source:
                variables[_LEVELS] = _NEAREST.get(self.effort, self.effort)
            else:
                warnings.append("the model's chat template has no levels of reasoning effort.")
        limit = self.budget if variables or wants is not False else 0
        return ThinkingPlan(variables, limit, tuple(warnings))
