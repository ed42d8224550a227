"""GenerationSpec: one generation as a client asks for it through any interface, and its request to the engine."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from edgespec.engine.drafting import MAX_DRAFT, Speculation
from edgespec.engine.events import AnswerStart, MemoryUse, Prompt, Request
from edgespec.engine.structured_output import Part, Structure, arguments_part, call_part, either, is_shallow
from edgespec.errors import InvalidRequest
from edgespec.service.client import ModelInfo
from edgespec.service.response import ResponseStream
from edgespec.text.chat_template import Message
from edgespec.text.stream import detect_format
from edgespec.text.tool_calls import NAME_CHARACTER, ToolFormat, load_json
from edgespec.text.tool_formats import detect_tool_format, make_reader, tool_instructions

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
        variables: dict[str, Any] = {}
        warnings: tuple[str, ...] = ()
        if wants is not None:
            variables = {name: wants for name, reads in _SWITCHES.items() if reads.search(source)}
        if wants is False and _LEVELS in source and _LEVEL_OFF.search(source):
            variables[_LEVELS] = "none"
        if wants is not False and self.effort and self.effort != "none":
            if _LEVELS in source:
                variables[_LEVELS] = _NEAREST.get(self.effort, self.effort)
            else:
                warnings = ("the model's chat template has no levels of reasoning effort.",)
        limit = self.budget if variables or wants is not False else 0
        return ThinkingPlan(variables, limit, warnings)


_NAME = re.compile(rf"{NAME_CHARACTER}{{1,256}}")


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call; `parameters` is a JSON schema. `is_strict`: a call follows all of it, or the
    request is refused; not where the model may call in a format that does not mark calls.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    is_strict: bool = False

    def to_dict(self) -> dict[str, Any]:
        """The form that chat templates expect."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


def make_tool(
    name: str, description: str | None, parameters: Mapping[str, Any] | None, *, is_strict: bool = False
) -> Tool:
    """A tool of a request. Without a schema it takes no arguments. Raises InvalidRequest for a name that the formats of
    tool calls cannot hold.
    """
    if not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"the tool name '{name[:100]}' cannot be called.",
            hint="Use 1 to 256 ASCII letters, digits or _ . : / - in it.",
        )
    return Tool(name, description or "", parameters or {"type": "object"}, is_strict)


def format_call(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    """A call as chat templates and OpenAI's chat interface write it."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


_MAX_ARGUMENTS_DEPTH = 64
ToolChoiceMode = Literal["auto", "none", "required"]


@dataclass(frozen=True, slots=True)
class GenerationSpec:
    """One generation as a client asks for it.

    prompt          messages, or raw text to continue
    settings        sampling settings, as SamplingParams names them; None leaves one to the model's defaults
    start           the beginning of the answer, which the model continues; not with a structure or a demanded call
    max_tokens      None: what the model's authors recommend, else as many as the context holds; 0: the prompt is only
                    read
    tool_choice     whether the model may ('auto'), must ('required') or must not ('none') call a tool
    forced_tool     name of the one tool that the model must call; takes precedence over `tool_choice`
    stop            texts that end the answer; they do not apply to calls that the model must make
    parallel_calls  whether an answer may hold several calls. None: any number where calling is the model's choice, one
                    where it must call
    structure       JSON that the answer must match, unless the answer is a tool call
    top_logprobs    alternatives reported for each token; None: no logprobs
    variables       extra variables of the chat template
    scores_prompt   whether the prompt's tokens are scored too, with as many alternatives
    warnings        what of the request is not followed, in sentences
    draft_max       tokens that are drafted at once, at most: 0 decodes plainly, None leaves it to the server
    thinking        what is asked of the reasoning; `variables` take precedence
    memory, owner   see Request
    """

    prompt: Prompt
    settings: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    structure: Structure | None = None
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoiceMode = "auto"
    forced_tool: str | None = None
    parallel_calls: bool | None = None
    top_logprobs: int | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    start: AnswerStart | None = None
    scores_prompt: bool = False
    draft_max: int | None = None
    thinking: Thinking = field(default_factory=Thinking)
    memory: MemoryUse | None = None
    owner: str = ""

    def __post_init__(self) -> None:
        """Raises InvalidRequest."""
        if not self.tools and self.must_call:
            raise InvalidRequest("tool_choice requires a tool call, but there are no tools.", hint="Add tools.")
        if self.start is not None and (self.structure is not None or self.must_call):
            raise InvalidRequest(
                "an answer of which the beginning is given cannot have a structure or be a tool call.",
                hint="End the messages with one of the user, or remove the structure.",
            )

    @property
    def must_call(self) -> bool:
        return self.forced_tool is not None or self.tool_choice == "required"

    @property
    def tools_in_use(self) -> tuple[Tool, ...]:
        return () if self.tool_choice == "none" else self.tools

    def limit_drafts(self, speculation: Speculation) -> Speculation | None:
        """What replaces the server's `speculation` for the request; None where nothing does."""
        if self.draft_max is None or not speculation.drafters:
            return None
        return replace(speculation, draft_max=min(self.draft_max, MAX_DRAFT), draft_tree=None)

    def make_response(self, model_info: ModelInfo) -> ResponseStream:
        """The stream that turns the engine's events into the parts of an answer."""
        tool_format, reader = detect_tool_format(model_info.chat_template), None
        if self._needs_reader(tool_format):
            reader = make_reader(tool_format, {tool.name: tool.parameters for tool in self.tools_in_use})
        unenforced = () if tool_format.is_marked else self._free_strict_tools()
        warnings = (
            *self.warnings,
            *self.thinking.plan(model_info.chat_template).warnings,
            *(("draft_max needs a drafter.",) if self.draft_max and not model_info.speculation.drafters else ()),
            *(f"the tool '{each.name}' is strict only where a call is demanded." for each in unenforced),
        )
        return ResponseStream(
            reader,
            allow_parallel_calls=self.parallel_calls is not False,
            demanded=[tool.name for tool in self._callable_tools()] if self.must_call else (),
            warnings=warnings,
        )

    def _free_strict_tools(self) -> list[Tool]:
        """The strict tools that the model may call outside of a structure."""
        is_free = not self.must_call and self.structure is None
        return [tool for tool in self.tools_in_use if is_free and tool.is_strict]

    def _needs_reader(self, tool_format: ToolFormat) -> bool:
        """Whether the text may hold tool calls, or headers around structured output."""
        return bool(self.tools_in_use) or (self.structure is not None and bool(tool_format.answer_header))

    def build_request(self, model_info: ModelInfo, *, token_limit: int, copy: int = 0) -> Request:
        """The engine's request for at most `token_limit` tokens. `copy` numbers the answers to one call: each has a
        seed of its own. Raises InvalidRequest.
        """
        tool_format = detect_tool_format(model_info.chat_template)
        thinking = self.thinking.plan(model_info.chat_template)
        prompt, variables = self.prompt, {**thinking.variables, **self.variables}
        structure = self.structure
        if structure is not None:  # it follows the header of the answer's message, if the model writes one (GPT-OSS)
            structure = replace(structure, first=tool_format.answer_header)
        opening: str | None = None
        if tools := self.tools_in_use:
            descriptions = [tool.to_dict() for tool in tools]
            variables["tools"] = descriptions
            if isinstance(prompt, tuple) and "tools" not in (model_info.chat_template or ""):
                prompt = _add_instructions(prompt, tool_instructions(descriptions))
            if self.must_call:
                is_parallel = bool(self.parallel_calls) and self.forced_tool is None
                structure = build_call_structure(tool_format, self._callable_tools(), parallel_calls=is_parallel)
            elif structure is not None:
                structure = either(structure, build_call_structure(tool_format, tools))
            elif tool_format.is_marked and self._free_strict_tools():
                opening = tool_format.opening
                structure = build_opened_calls(tool_format, tools, parallel_calls=self.parallel_calls is not False)
        longest = model_info.sampling.max_tokens if self.max_tokens is None else self.max_tokens
        return Request(
            prompt,
            sampling=model_info.sampling.resolve(self.settings),
            max_tokens=token_limit if longest is None else min(longest, token_limit),
            seed=None if self.seed is None else (self.seed + copy) % 2**32,
            stop=() if self.must_call else self.stop,
            variables=variables,
            structure=structure,
            opening=opening,
            visible=tool_format.visible if self._needs_reader(tool_format) else (),
            top_logprobs=self.top_logprobs,
            start=self.start,
            scores_prompt=self.scores_prompt,
            max_reasoning=thinking.max_reasoning,
            memory=self.memory,
            owner=self.owner,
        )

    def _callable_tools(self) -> Sequence[Tool]:
        if self.forced_tool is None:
            return self.tools
        named = [tool for tool in self.tools if tool.name == self.forced_tool]
        if not named:
            raise InvalidRequest(
                f"tool_choice names '{self.forced_tool[:100]}', which is not among the tools.", hint="Add it to tools."
            )
        return named


def build_call_structure(tool_format: ToolFormat, tools: Sequence[Tool], *, parallel_calls: bool = False) -> Structure:
    """An answer that is one call of one of `tools`, or several with `parallel_calls` where the format allows several.

    Raises InvalidRequest.
    """
    frame = tool_format.frame
    alternatives: list[tuple[Part, ...]] = []
    for tool in tools:
        if frame.holds_name:
            arguments = arguments_part(tool.parameters, is_strict=tool.is_strict)
        else:
            arguments = call_part(tool.name, tool_format.argument, tool.parameters, is_strict=tool.is_strict)
        before = (part.replace("{name}", tool.name) for part in frame.before)
        alternatives.append((*before, arguments, *frame.after))
    return Structure(tuple(alternatives), frame.first, frame.last, frame.between if parallel_calls else None)


def build_opened_calls(tool_format: ToolFormat, tools: Sequence[Tool], *, parallel_calls: bool) -> Structure:
    """What follows the opening of calls of `tools` among the text of an answer, in a format that marks them.

    `parallel_calls`: where the format puts several calls into one block, there may be several. Raises InvalidRequest.
    """
    has_several = parallel_calls and bool(tool_format.frame.first)
    structure = build_call_structure(tool_format, tools, parallel_calls=has_several)
    if structure.first:
        return replace(structure, first=structure.first[1:])
    return replace(structure, alternatives=tuple(each[1:] for each in structure.alternatives))


def make_message(role: str, content: str, **extra: Any) -> Message:
    """A message with the `extra` fields that chat templates may read; those that are None are left out."""
    return Message(role, content, {key: value for key, value in extra.items() if value is not None})


def split_start(messages: tuple[Message, ...]) -> tuple[tuple[Message, ...], AnswerStart]:
    """The messages before the last one, and that one as the beginning of the answer.

    Raises InvalidRequest if it is not text of the assistant.
    """
    *before, last = messages
    if last.role != "assistant" or last.extra.get("tool_calls"):
        raise InvalidRequest(
            "only a last message of the assistant, without tool calls, can be continued.",
            hint="End the messages with the beginning of the answer.",
        )
    return tuple(before), AnswerStart(last.content, last.extra.get("reasoning_content") or "")


def parse_arguments(text: str) -> Any:
    """A call's arguments as chat templates expect them: parsed JSON, or `text` where it is invalid or too deep."""
    value = load_json(text, text)
    return value if is_shallow(value, _MAX_ARGUMENTS_DEPTH) else text


def _add_instructions(prompt: tuple[Message, ...], text: str) -> tuple[Message, ...]:
    """Append `text` to the system message; add one where there is none."""
    if prompt and prompt[0].role == "system":
        system = replace(prompt[0], content=f"{prompt[0].content}\n\n{text}")
        return (system, *prompt[1:])
    return (Message("system", text), *prompt)
