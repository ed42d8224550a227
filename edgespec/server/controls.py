"""What a request demands of the text of the answer: response_format, and fields of llama.cpp's server and vLLM."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AliasChoices, BeforeValidator, Field, StringConstraints

from edgespec.engine.structured_output import Structure, Text, grammar_structure, json_structure, regex_structure
from edgespec.errors import InvalidRequest
from edgespec.server.fields import Body, CompletionBody, ModelName, ResponseFormat
from edgespec.server.record import current_record
from edgespec.server.slots import ModelSlot, Slot
from edgespec.service.generation_spec import DraftLength, Effort, Thinking
from edgespec.units import parse_duration

# Loading and unloading, and how long a model stays loaded: Ollama's `keep_alive`, LM Studio's `ttl`.


_MAX_LENGTH = 64
_NOT_ALLOWED = "keep_alive (ttl) is ignored: this caller may not manage models."


def _parse(value: Any) -> float:
    if not isinstance(value, int | float | str):
        raise ValueError("neither a number nor a duration")
    return parse_duration(str(value)[:_MAX_LENGTH])


KeepAlive = Annotated[float, Field(allow_inf_nan=True), BeforeValidator(_parse, json_schema_input_type=float | str)]
"""Seconds, or a duration such as "10m"; less than 0 is without end: `inf`."""


class ResidencyBody(Body):
    """A request that names a model. What the last call has set counts until the model is unloaded."""

    keep_alive: KeepAlive | None = Field(default=None, validation_alias=AliasChoices("ttl", "keep_alive"))

    def keep(self, slot: Slot) -> tuple[str, ...]:
        """Set how long a model of this machine stays loaded; returns a warning where the caller may not."""
        if self.keep_alive is None or not isinstance(slot, ModelSlot):
            return ()
        if not current_record().caller.may_manage:
            return (_NOT_ALLOWED,)
        slot.keep_alive_s = self.keep_alive
        return ()


class LoadRequest(ResidencyBody):
    """The body of /models/load."""

    model: ModelName


class UnloadRequest(Body):
    """The body of /models/unload. `now`: end the model's process, whatever it does; its requests fail."""

    model: ModelName
    now: bool = False


GrammarText = Annotated[str, StringConstraints(min_length=1, max_length=2**16)]
Choices = Annotated[list[Annotated[str, StringConstraints(min_length=1, max_length=4096)]], Field(max_length=256)]


class ConstrainedBody(CompletionBody, ResidencyBody):
    """The fields of a body of which at most one constrains the answer.

    `grammar` and `json_schema` are llama.cpp's, `guided_json`, `guided_regex`, `guided_choice` and `guided_grammar`
    vLLM's. Grammars are GBNF or llguidance's Lark.
    """

    response_format: ResponseFormat | None = None
    grammar: GrammarText | None = None
    json_schema: dict[str, Any] | bool | None = None
    guided_json: dict[str, Any] | bool | str | None = None
    guided_regex: GrammarText | None = None
    guided_choice: Choices | None = None
    guided_grammar: GrammarText | None = None

    def structure(self) -> Structure | None:
        """The constraint, if there is one. Raises InvalidRequest for two, and for one that cannot be read."""
        made = {
            "response_format": self.response_format.structure() if self.response_format else None,
            "grammar": grammar_structure(self.grammar) if self.grammar else None,
            "json_schema": json_structure(self.json_schema) if self.json_schema is not None else None,
            "guided_json": json_structure(_parse_json(self.guided_json)) if self.guided_json is not None else None,
            "guided_regex": regex_structure(self.guided_regex) if self.guided_regex else None,
            "guided_choice": Structure(tuple((Text(each),) for each in self.guided_choice or ())),
            "guided_grammar": grammar_structure(self.guided_grammar) if self.guided_grammar else None,
        }
        found = {name: structure for name, structure in made.items() if structure and structure.alternatives}
        if len(found) > 1:
            raise InvalidRequest(f"{' and '.join(found)} both constrain the answer.", hint="Send one of them.")
        return next(iter(found.values()), None)


def _parse_json(schema: dict[str, Any] | bool | str) -> Any:
    """vLLM takes the schema as text too."""
    if not isinstance(schema, str):
        return schema
    try:
        return json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("guided_json is not valid JSON.", hint="Send the schema as an object.") from error


# Fields of request bodies that control drafting and reasoning.


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
