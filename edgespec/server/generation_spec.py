"""What a client asks for, whatever interface it came by, and how it becomes a request to the engine."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from edgespec.core.sampling import SamplingParams
from edgespec.engine.events import Request
from edgespec.engine.structured_output import Json, Structure, Text, either, is_shallow, json_part, texts
from edgespec.errors import InvalidRequest
from edgespec.registry.schema import SamplingDefaults
from edgespec.server.chat_format import answer_structure, tool_format
from edgespec.server.tools import Tool
from edgespec.service.client import ModelInfo
from edgespec.text.chat_template import Message
from edgespec.text.harmony import HARMONY
from edgespec.text.toolcalls import ToolFormat, instructions

_DEEPEST = 64
Choice = Literal["auto", "none", "required"]


@dataclass(frozen=True, slots=True)
class Settings:
    """How to sample; None leaves a setting to the model's own defaults."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] | None = None

    def over(self, recommended: SamplingDefaults) -> SamplingParams:
        """What is given, else what the model's authors recommend, else the model's own distribution.

        Raises InvalidRequest.
        """
        values = {**asdict(recommended), **{name: value for name, value in asdict(self).items() if value is not None}}
        return SamplingParams(**{name: value for name, value in values.items() if value is not None})


@dataclass(frozen=True, slots=True)
class GenerationSpec:
    """One call of the server.

    prompt     messages, or text to continue as it stands
    choice     'auto', 'none', 'required', or the one tool to call: Choice or a name in `forced`
    several    whether an answer may hold several calls, where the model's form has room for them; None: as many as the
               model likes, and one where a call has to be made
    structure  JSON that the answer has to be, unless it is a call of a tool
    """

    prompt: str | tuple[Message, ...]
    settings: Settings = field(default_factory=Settings)
    max_tokens: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    structure: Structure | None = None
    tools: tuple[Tool, ...] = ()
    choice: Choice = "auto"
    forced: str | None = None
    several: bool | None = None
    top_logprobs: int | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises InvalidRequest."""
        if not self.tools and (self.forced is not None or self.choice == "required"):
            raise InvalidRequest("tool_choice asks for a call, but there are no tools.", hint="Give tools.")

    def needs_reader(self, form: ToolFormat) -> bool:
        """Whether the text has to be split: it may hold calls, or headers around what is structured."""
        return bool(self.tools_in_use) or (self.structure is not None and form is HARMONY)

    @property
    def tools_in_use(self) -> tuple[Tool, ...]:
        return () if self.choice == "none" else self.tools

    def request(self, model_info: ModelInfo, *, most_tokens: int, copy: int = 0) -> Request:
        """For the engine; `copy` counts the answers to one call. Raises InvalidRequest."""
        form = tool_format(model_info.template)
        prompt, variables = self.prompt, dict(self.variables)
        structure = answer_structure(self.structure, form) if self.structure is not None else None
        if tools := self.tools_in_use:
            described = [tool.described() for tool in tools]
            variables["tools"] = described
            if isinstance(prompt, tuple) and "tools" not in (model_info.template or ""):
                prompt = _instructed(prompt, instructions(described))
            is_demanded = self.choice == "required" or self.forced is not None
            if is_demanded:
                structure = call_structure(form, self._callable(), several=bool(self.several) and self.forced is None)
            elif structure is not None:
                structure = either(structure, call_structure(form, tools))
        if structure is not None and self.stop:
            raise InvalidRequest("a stop text could break the answer's structure.", hint="Leave stop out.")
        sampling = self.settings.over(model_info.sampling)
        seed = None if self.seed is None else (self.seed + copy) % 2**32
        most = min(self.max_tokens or most_tokens, most_tokens)
        visible = form.visible if self.needs_reader(form) else ()
        return Request(prompt, sampling, most, seed, self.stop, variables, structure, visible, self.top_logprobs)

    def _callable(self) -> Sequence[Tool]:
        if self.forced is None:
            return self.tools
        named = [tool for tool in self.tools if tool.name == self.forced]
        if not named:
            raise InvalidRequest(f"tool_choice names '{self.forced}', which is not among the tools.", hint="Add it.")
        return named


def call_structure(form: ToolFormat, tools: Sequence[Tool], *, several: bool = False) -> Structure:
    """An answer that is one call of one of `tools`, or `several`. Raises InvalidRequest."""
    frame = form.frame
    ways: list[tuple[Text | Json, ...]] = []
    for tool in tools:
        body: dict[str, Any] = {"type": "object", **tool.parameters}
        if not frame.holds_name:
            at_top: dict[str, Any] = {}  # where references look
            for key in ("$defs", "definitions"):
                if key in body:
                    at_top[key] = body.pop(key)
            body = {
                "type": "object",
                "properties": {"name": {"const": tool.name}, form.argument: body},
                "required": ["name", form.argument],
                "additionalProperties": False,
                **at_top,
            }
        before = (part.replace("{name}", tool.name) for part in frame.before)
        ways.append((*texts(before), json_part(body), *texts(frame.after)))
    between = texts(frame.between) if several and frame.between is not None else None
    return Structure(tuple(ways), texts(frame.first), texts(frame.last), between)


def message(role: str, content: str, **extra: Any) -> Message:
    """A message, with what templates may read beside its text."""
    return Message(role, content, {key: value for key, value in extra.items() if value is not None})


def loaded_arguments(text: str) -> Any:
    """A call's arguments as templates expect them; what is no JSON stays text."""
    try:
        loaded = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return loaded if is_shallow(loaded, _DEEPEST) else text


def _instructed(prompt: tuple[Message, ...], told: str) -> tuple[Message, ...]:
    if prompt and prompt[0].role == "system":
        first = replace(prompt[0], content=f"{prompt[0].content}\n\n{told}")
        return (first, *prompt[1:])
    return (Message("system", told), *prompt)
