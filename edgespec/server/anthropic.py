"""/v1/messages and /v1/messages/count_tokens: Anthropic's interface."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from edgespec.answers.generation_spec import GenerationSpec, ToolChoiceMode, make_message, split_start
from edgespec.answers.response import Done, Started, new_id
from edgespec.answers.thinking import Thinking
from edgespec.answers.tools import Tool, format_call
from edgespec.engine.structure import json_structure
from edgespec.errors import InvalidRequest
from edgespec.server.answers import Block, Event, Step, Writer, read_arguments
from edgespec.server.fields import (
    FEW,
    MANY,
    AnyModelName,
    Body,
    ContentPart,
    Count,
    EffortConfig,
    Function,
    GenerationBody,
    Parts,
    Said,
    SamplingBody,
    Stops,
    ThinkingBody,
    Tokens,
    join_lines,
    join_text,
    require_fields,
)
from edgespec.server.media import warn_of_media
from edgespec.text.chat_template import Message

_TOOL_CHOICES: dict[str, ToolChoiceMode] = {"auto": "auto", "any": "required", "tool": "auto", "none": "none"}
_STOP_REASONS = {
    "stop": "end_turn", "length": "max_tokens", "repetition": "max_tokens", "tool_calls": "tool_use",
    "content_filter": "refusal",
}  # fmt: skip


class ContentBlock(ContentPart):
    """A part of a message: text, reasoning, a call, or the result of a call."""

    thinking: str = ""
    id: str = ""
    name: str = ""
    input: dict[str, Any] = Field(default_factory=dict)
    tool_use_id: str = ""
    content: str | Parts | None = None


_WITHOUT_TEXT = ("tool_use", "thinking", "redacted_thinking")  # supported


class AnthropicMessage(Body):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[ContentBlock], MANY]

    def messages(self) -> Iterator[Message]:
        """One message, preceded by one for each tool result. Raises InvalidRequest."""
        if isinstance(self.content, str):
            yield make_message(self.role, self.content)
            return
        texts, thoughts, calls = list[str](), list[str](), list[dict[str, Any]]()
        for block in self.content:
            match block.type:
                case "tool_result":
                    require_fields(tool_use_id=block.tool_use_id)
                    yield make_message("tool", join_text(block.content), tool_call_id=block.tool_use_id)
                case "tool_use":
                    require_fields(id=block.id, name=block.name)
                    calls.append(format_call(block.id, block.name, block.input))
                case "thinking" | "redacted_thinking":
                    thoughts.append(block.thinking)
                case _:
                    texts.append(join_text([block]))
        text, reasoning = join_lines(texts), join_lines(thoughts)
        if text or calls or all(block.type != "tool_result" for block in self.content):
            yield make_message(self.role, text, tool_calls=calls or None, reasoning_content=reasoning or None)

    def said(self) -> Iterator[Said]:
        if isinstance(self.content, str):
            yield Said(self.role, self.content)
            return
        for block in self.content:
            if block.type == "tool_result":
                yield Said("tool", block.content)
            elif block.type in _WITHOUT_TEXT:
                yield Said(self.role, None)
            else:
                yield Said(self.role, [block])


class AnthropicTool(Function):
    type: str | None = None
    parameters: dict[str, Any] | None = Field(default=None, validation_alias="input_schema")

    def tool(self) -> Tool:
        if self.type not in (None, "custom"):
            message = f"tools of type '{self.type[:100]}' are not supported."
            raise InvalidRequest(message, hint="Send tools that have an input_schema.")
        return super().tool()


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(EffortConfig):
    format: OutputFormat | None = None


class AnthropicThinking(Body):
    """`adaptive` leaves it to the model."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Count | None = None


class CountRequest(ThinkingBody):
    """The body of /v1/messages/count_tokens."""

    model: AnyModelName = ""
    messages: Annotated[list[AnthropicMessage], MANY, Field(min_length=1)]
    system: str | Parts | None = None
    tools: Annotated[list[AnthropicTool], FEW] | None = None
    tool_choice: ToolChoice | None = None
    thinking: AnthropicThinking | None = None
    output_config: OutputConfig | None = None

    def said(self) -> Iterator[Said]:
        yield Said("system", _drop_signature(self.system))
        for turn in self.messages:
            yield from turn.said()

    def generation_spec(self) -> GenerationSpec:
        choice, given = self.tool_choice or ToolChoice(type="auto"), self.thinking or AnthropicThinking(type="adaptive")
        if choice.type == "tool" and choice.name is None:
            raise InvalidRequest("tool_choice of type 'tool' needs a name.", hint="Set tool_choice.name.")
        is_single = choice.disable_parallel_tool_use
        system = join_text(_drop_signature(self.system))
        told = (make_message("system", system),) if system else ()
        prompt, start = (*told, *(each for turn in self.messages for each in turn.messages())), None
        if prompt[-1].role == "assistant" and not prompt[-1].extra.get("tool_calls"):  # its text is continued
            prompt, start = split_start(prompt)
        return GenerationSpec(
            prompt=prompt,
            start=start,
            tools=tuple(each.tool() for each in self.tools or ()),
            tool_choice=_TOOL_CHOICES[choice.type],
            forced_tool=choice.name if choice.type == "tool" else None,
            parallel_calls=None if is_single is None else not is_single,
            thinking=Thinking(
                {"enabled": True, "disabled": False}.get(given.type),
                self.output_config.effort if self.output_config is not None else None,
                self.reasoning_budget_tokens if given.budget_tokens is None else given.budget_tokens,
            ),
            warnings=warn_of_media(self.said()),
        )


_VOLATILE = "x-anthropic-billing-header:"
"""The beginning of the system block in which Claude Code signs each request. The block differs from request to request:
with it in the prompt, no prompt would share a cached prefix with the one before.
"""


def _drop_signature(system: str | list[ContentPart] | None) -> str | list[ContentPart] | None:
    return [each for each in system if not each.text.startswith(_VOLATILE)] if isinstance(system, list) else system


class MessagesRequest(CountRequest, SamplingBody, GenerationBody):
    """The body of /v1/messages."""

    refused = ("container", "mcp_servers")

    max_tokens: Tokens
    stop_sequences: Stops | None = None
    output_format: OutputFormat | None = None

    def writer(self) -> MessagesWriter:
        return MessagesWriter(self.model)

    def generation_spec(self) -> GenerationSpec:
        form = self.output_format or (self.output_config.format if self.output_config else None)
        return replace(
            super().generation_spec(),
            structure=json_structure(form.schema_) if form is not None else None,
            settings=self.settings(),
            seed=self.seed,
            max_tokens=self.max_tokens,
            stop=tuple(self.stop_sequences or ()),
            draft_max=self.draft_max,
        )


_DELTAS = {  # kind of a block -> type of its events, and the field that grows
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


class MessagesWriter(Writer):
    """Writes the answer as one message."""

    def __init__(self, model: str) -> None:
        super().__init__()
        self._head = {"id": new_id("msg_"), "type": "message", "role": "assistant", "model": model}

    def write(self, index: int, step: Step) -> Iterator[Event]:
        match step:
            case Started(prompt, cached):
                empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
                message = {**self._head, **empty, "usage": _format_usage(prompt, cached, 0)}
                yield {"type": "message_start", "message": message}
            case "begin", block, _:
                yield self._block_event("start", content_block=_format_block(block))
            case "grow", block, text:
                kind, name = _DELTAS[block.kind]
                yield self._block_event("delta", delta={"type": kind, name: text})
            case "close", _, _:
                yield self._block_event("stop")
            case Done():
                fields = {"delta": _format_stop(step), "usage": _count_usage(step)}
                yield {"type": "message_delta", **fields, **step.extensions()}

    def finish(self) -> Iterator[Event]:
        yield {"type": "message_stop"}

    def response_body(self) -> dict[str, Any]:
        answer = self.answers[0]
        assert answer.end is not None
        content, usage = list(map(_format_block, answer.blocks)), _count_usage(answer.end)
        return {
            **self._head, "content": content, **_format_stop(answer.end), "usage": usage, **answer.end.extensions(),
        }  # fmt: skip

    def _block_event(self, kind: str, **data: Any) -> Event:
        return {"type": f"content_block_{kind}", "index": len(self.answers[0].blocks) - 1, **data}


def _format_block(block: Block) -> dict[str, Any]:
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    return {"type": "tool_use", "id": block.call_id("toolu_"), "name": block.name, "input": read_arguments(block.text)}


def _format_stop(end: Done) -> dict[str, str | None]:
    if end.stop is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": end.stop}
    return {"stop_reason": _STOP_REASONS[end.reason], "stop_sequence": None}


def _count_usage(end: Done) -> dict[str, int]:
    return _format_usage(end.metrics.prompt_tokens, end.metrics.cached_tokens, end.metrics.emitted_tokens)


def _format_usage(prompt: int, cached: int, emitted: int) -> dict[str, int]:
    """Anthropic's `input_tokens` leave out the cached part of the prompt."""
    return {
        "input_tokens": prompt - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": emitted,
    }
