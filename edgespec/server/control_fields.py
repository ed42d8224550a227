"""Fields of request bodies that control drafting and reasoning."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import AfterValidator, AliasChoices, Field

from edgespec.server.fields import Body
from edgespec.service.draft_length import DraftLength
from edgespec.service.thinking import Effort, Thinking

Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
Budget = Annotated[int, Field(ge=-1, le=2**31 - 1), AfterValidator(lambda n: None if n == -1 else n)]
"""Tokens of reasoning; -1 is no limit."""
_BUDGETS = AliasChoices("reasoning_budget_tokens", "thinking_budget_tokens", "thinking_token_budget")


class DraftingBody(Body):
    """How many tokens are drafted at once; see DraftLength. The names with a dot are those of llama.cpp's server.

    Where `memory` is false, the memory neither keeps this call's texts nor drafts from earlier ones.
    """

    draft_max: Count | None = Field(default=None, validation_alias=AliasChoices("draft_max", "speculative.n_max"))
    draft_min: Count | None = Field(default=None, validation_alias=AliasChoices("draft_min", "speculative.n_min"))
    memory: bool | None = None

    def draft_length(self) -> DraftLength:
        """Raises InvalidRequest."""
        return DraftLength(self.draft_max, self.draft_min or 0)


class ThinkingBody(Body):
    """A limit of the reasoning, by its names in llama.cpp's server and vLLM."""

    reasoning_budget_tokens: Budget | None = Field(default=None, validation_alias=_BUDGETS)

    def make_thinking(self, *, is_on: bool | None = None, effort: Effort | None = None) -> Thinking:
        return Thinking(is_on, effort, self.reasoning_budget_tokens)


class AnthropicThinking(Body):
    """`adaptive` leaves it to the model."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Count | None = None


class EffortConfig(Body):
    effort: Effort | None = None


class AnthropicThinkingBody(ThinkingBody):
    """Anthropic's fields of the reasoning."""

    thinking: AnthropicThinking | None = None
    output_config: EffortConfig | None = None

    def thinking_asked(self) -> Thinking:
        effort = self.output_config.effort if self.output_config is not None else None
        if self.thinking is None:
            return self.make_thinking(effort=effort)
        given = self.make_thinking(is_on={"enabled": True, "disabled": False}.get(self.thinking.type), effort=effort)
        return given if self.thinking.budget_tokens is None else replace(given, budget=self.thinking.budget_tokens)
