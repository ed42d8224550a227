"""GenerationSpec: one generation as a client asks for it through any interface, and its request to the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from edgespec.answers.call_structure import build_call_structure, build_opened_calls
from edgespec.answers.response import ResponseStream
from edgespec.answers.thinking import Thinking
from edgespec.answers.tools import Tool
from edgespec.autopilot.speculation import MAX_DRAFT, Speculation
from edgespec.engine.events import AnswerStart, MemoryUse, Prompt, Request
from edgespec.engine.model_info import ModelInfo
from edgespec.engine.repetition import RepetitionDetection
from edgespec.engine.structure import Structure, either
from edgespec.errors import InvalidRequest
from edgespec.text.call_format import CallFormat
from edgespec.text.chat_template import Message
from edgespec.text.known_formats import HARMONY
from edgespec.text.readers import make_reader, visible_texts

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
    parallel_calls  whether an answer may hold several calls. None: any number if calling is the model's choice, one
                    if it must call
    structure       JSON that the answer must match, unless the answer is a tool call
    top_logprobs    alternatives reported for each token; None: no logprobs
    variables       extra variables of the chat template
    scores_prompt   whether the prompt's tokens are scored too, with as many alternatives
    warnings        what of the request is not followed, in sentences
    draft_max       tokens that are drafted at once, at most: 0 decodes plainly, None leaves it to the server
    thinking        what is asked of the reasoning; `variables` take precedence
    repetition, memory, owner: see Request
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
    repetition: RepetitionDetection | None = None
    thinking: Thinking = field(default_factory=Thinking)
    memory: MemoryUse | None = None
    owner: str = ""

    def __post_init__(self) -> None:
        """Raises InvalidRequest for a demanded call without tools, and for a `start` with a structure or a demanded
        call.
        """
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
        """The Speculation of this request in place of the server's; None to keep the server's."""
        if self.draft_max is None or not speculation.drafters:
            return None
        return replace(speculation, draft_max=min(self.draft_max, MAX_DRAFT), draft_tree=None)

    def make_response(self, model_info: ModelInfo) -> ResponseStream:
        """The stream that turns the engine's events into the parts of an answer."""
        call_format, reader = model_info.template.calls, None
        if self._needs_reader(call_format):
            reader = make_reader(call_format, {tool.name: tool.parameters for tool in self.tools_in_use})
        unenforced = () if call_format.is_marked else self._free_strict_tools()
        warnings = (
            *self.warnings,
            *self.thinking.plan(model_info.template).warnings,
            *((model_info.template.tools_notice,) if self.tools_in_use and model_info.template.tools_notice else ()),
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

    def _needs_reader(self, call_format: CallFormat) -> bool:
        """Whether the text may hold tool calls, or headers around structured output."""
        return bool(self.tools_in_use) or (self.structure is not None and call_format == HARMONY)

    def build_request(self, model_info: ModelInfo, *, token_limit: int, copy: int = 0) -> Request:
        """The engine's request for at most `token_limit` tokens. `copy` numbers the answers to one call: each has a
        seed of its own. Raises InvalidRequest.
        """
        template = model_info.template
        call_format, thinking = template.calls, self.thinking.plan(template)
        variables = {**thinking.variables, **self.variables}
        structure, opening = self.structure, None
        if structure is not None:  # it follows the header of the answer's message, if the model writes one
            structure = replace(structure, first=(template.header,))
        if tools := self.tools_in_use:
            variables["tools"] = [tool.to_dict() for tool in tools]
            if self.must_call:
                is_parallel = bool(self.parallel_calls) and self.forced_tool is None
                structure = build_call_structure(call_format, self._callable_tools(), parallel_calls=is_parallel)
            elif structure is not None:
                structure = either(structure, build_call_structure(call_format, tools))
            elif call_format.is_marked and self._free_strict_tools():
                opening = call_format.opening
                structure = build_opened_calls(call_format, tools, parallel_calls=self.parallel_calls is not False)
        longest = model_info.sampling.max_tokens if self.max_tokens is None else self.max_tokens
        return Request(
            self.prompt,
            sampling=model_info.sampling.resolve(self.settings),
            max_tokens=token_limit if longest is None else min(longest, token_limit),
            seed=None if self.seed is None else (self.seed + copy) % 2**32,
            stop=() if self.must_call else self.stop,
            variables=variables,
            structure=structure,
            opening=opening,
            visible=visible_texts(call_format) if self._needs_reader(call_format) else (),
            top_logprobs=self.top_logprobs,
            start=self.start,
            scores_prompt=self.scores_prompt,
            max_reasoning=thinking.max_reasoning,
            repetition=self.repetition,
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
