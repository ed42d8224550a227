"""/v1/messages and /v1/messages/count_tokens: Anthropic's interface."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from edgespec.engine.structured_output import json_structure
from edgespec.errors import InvalidRequest
from edgespec.server.fields import (
    FEW,
    MANY,
    AnyModelName,
    Body,
    Count,
    EffortConfig,
    GenerationBody,
    Stops,
    ThinkingBody,
    Tokens,
    TopK,
    TopP,
    Writer,
    join_text,
    read_arguments,
    refuse_fields,
)
from edgespec.service.generation_spec import (
    GenerationSpec,
    Settings,
    Thinking,
    Tool,
    ToolChoiceMode,
    format_call,
    make_message,
    make_tool,
    split_start,
)
from edgespec.service.response import Done, Part, ReasoningDelta, Started, TextDelta, new_id
from edgespec.text.chat_template import Message
from edgespec.text.tool_formats import CallDelta, CallEnd, CallStart

_TOOL_CHOICES: dict[str, ToolChoiceMode] = {"auto": "auto", "any": "required", "tool": "auto", "none": "none"}
_STOP_REASONS = {
    "stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal",
}  # fmt: skip


class TextBlock(Body):
    type: Literal["text"]
    text: str


class ThinkingBlock(Body):
    type: Literal["thinking", "redacted_thinking"]
    thinking: str = ""


class UseBlock(Body):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any] = Field(default_factory=dict)


class OtherBlock(Body):
    type: str


class ResultBlock(Body):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Annotated[list[TextBlock | OtherBlock], MANY] | None = None


Block = TextBlock | ThinkingBlock | UseBlock | ResultBlock | OtherBlock


class AnthropicMessage(Body):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], MANY]

    def messages(self) -> Iterator[Message]:
        """One message, preceded by one for each tool result. Raises InvalidRequest."""
        if isinstance(self.content, str):
            yield make_message(self.role, self.content)
            return
        text, reasoning, calls = "", "", list[dict[str, Any]]()
        for block in self.content:
            if isinstance(block, ResultBlock):
                yield make_message("tool", join_text(block.content), tool_call_id=block.tool_use_id)
            elif isinstance(block, UseBlock):
                calls.append(format_call(block.id, block.name, block.input))
            elif isinstance(block, ThinkingBlock):
                reasoning += block.thinking
            else:
                text += join_text([block])
        if text or calls or not any(isinstance(block, ResultBlock) for block in self.content):
            yield make_message(self.role, text, tool_calls=calls or None, reasoning_content=reasoning or None)


class AnthropicTool(Body):
    type: str | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any] = Field(default_factory=dict)
    strict: bool | None = None

    def tool(self) -> Tool:
        if self.type not in (None, "custom"):
            message = f"tools of type '{self.type[:100]}' are not supported."
            raise InvalidRequest(message, hint="Send tools that have an input_schema.")
        return make_tool(self.name, self.description, self.input_schema, is_strict=bool(self.strict))


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
    system: str | Annotated[list[TextBlock], MANY] | None = None
    tools: Annotated[list[AnthropicTool], FEW] | None = None
    tool_choice: ToolChoice | None = None
    thinking: AnthropicThinking | None = None
    output_config: OutputConfig | None = None

    def prompt(self) -> tuple[Message, ...]:
        system = join_text(self.system)
        messages = [each for turn in self.messages for each in turn.messages()]
        return (*((make_message("system", system),) if system else ()), *messages)

    def generation_spec(self) -> GenerationSpec:
        choice = self.tool_choice or ToolChoice(type="auto")
        if choice.type == "tool" and choice.name is None:
            raise InvalidRequest("tool_choice of type 'tool' needs a name.", hint="Set tool_choice.name.")
        is_single = choice.disable_parallel_tool_use
        return GenerationSpec(
            **self._continue(self.prompt()),
            tools=tuple(each.tool() for each in self.tools or ()),
            tool_choice=_TOOL_CHOICES[choice.type],
            forced_tool=choice.name if choice.type == "tool" else None,
            parallel_calls=None if is_single is None else not is_single,
            thinking=self._thinking(),
        )

    def _thinking(self) -> Thinking:
        effort = self.output_config.effort if self.output_config is not None else None
        if self.thinking is None:
            return self.make_thinking(effort=effort)
        given = self.make_thinking(is_on={"enabled": True, "disabled": False}.get(self.thinking.type), effort=effort)
        return given if self.thinking.budget_tokens is None else replace(given, budget=self.thinking.budget_tokens)

    def _continue(self, prompt: tuple[Message, ...]) -> dict[str, Any]:
        """The fields of a spec for `prompt`; a last message of the assistant is continued. Raises InvalidRequest."""
        if prompt[-1].role != "assistant" or prompt[-1].extra.get("tool_calls"):
            return {"prompt": prompt}
        messages, start = split_start(prompt)
        if start.text != start.text.rstrip():
            raise InvalidRequest("the last assistant message ends with white space.", hint="Remove it.")
        return {"prompt": messages, "start": start}


class MessagesRequest(CountRequest, GenerationBody):
    """The body of /v1/messages."""

    max_tokens: Tokens
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    stop_sequences: Stops | None = None
    output_format: OutputFormat | None = None
    container: Any = None
    mcp_servers: list[Any] | None = None

    def writer(self) -> MessagesWriter:
        return MessagesWriter(self.model)

    def generation_spec(self) -> GenerationSpec:
        refuse_fields(self, "container", "mcp_servers")
        form = self.output_format or (self.output_config.format if self.output_config else None)
        return replace(
            super().generation_spec(),
            structure=json_structure(form.schema_) if form is not None else None,
            settings=Settings(self.temperature, self.top_p, self.top_k),
            max_tokens=self.max_tokens,
            stop=tuple(self.stop_sequences or ()),
            draft_length=self.draft_length(),
        )


class MessagesWriter(Writer):
    """One message."""

    def __init__(self, model: str) -> None:
        self._head = {"id": new_id("msg_"), "type": "message", "role": "assistant", "model": model}
        self._blocks: list[dict[str, Any]] = []
        self._is_open = False  # whether the last block may still grow
        self._end: Done | None = None

    def response_body(self) -> dict[str, Any]:
        assert self._end is not None
        return {
            **self._head,
            "content": self._blocks,
            **_format_stop(self._end),
            "usage": _count_usage(self._end),
            **self._end.extensions(),
        }

    def events(self, index: int, part: Part) -> Iterator[dict[str, Any]]:
        match part:
            case Started(prompt, cached):
                empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
                message = {**self._head, **empty, "usage": _format_usage(prompt, cached, 0)}
                yield {"type": "message_start", "message": message}
            case TextDelta(text):
                yield from self._grow({"type": "text", "text": ""}, "text", text)
            case ReasoningDelta(text):
                yield from self._grow({"type": "thinking", "thinking": "", "signature": ""}, "thinking", text)
            case CallStart(name=name):
                yield from self._begin({"type": "tool_use", "id": new_id("toolu_"), "name": name, "input": {}})
            case CallDelta(arguments=arguments):
                yield self._block_event("delta", delta={"type": "input_json_delta", "partial_json": arguments})
            case CallEnd(call=call):
                self._blocks[-1]["input"] = read_arguments(call.arguments)
                yield from self._close()
            case Done():
                self._end = part
                yield from self._close()
                fields = {"delta": _format_stop(part), "usage": _count_usage(part)}
                yield {"type": "message_delta", **fields, **part.extensions()}

    def finish(self) -> Iterator[dict[str, Any]]:
        yield {"type": "message_stop"}

    def _grow(self, empty: dict[str, Any], key: str, text: str) -> Iterator[dict[str, Any]]:
        """Append `text` to the last block; begin with the block `empty` unless the last one is of the same type."""
        if not self._blocks or self._blocks[-1]["type"] != empty["type"]:
            yield from self._begin(empty)
        self._blocks[-1][key] += text
        yield self._block_event("delta", delta={"type": f"{key}_delta", key: text})

    def _begin(self, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self._close()
        self._blocks.append(block)
        self._is_open = True
        yield self._block_event("start", content_block=dict(block))

    def _close(self) -> Iterator[dict[str, Any]]:
        if self._is_open:
            self._is_open = False
            yield self._block_event("stop")

    def _block_event(self, kind: str, **data: Any) -> dict[str, Any]:
        """An event of the last block."""
        return {"type": f"content_block_{kind}", "index": len(self._blocks) - 1, **data}


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
