"""/v1/messages: Anthropic's interface, and its token count."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from edgespec.core.metrics import Metrics
from edgespec.errors import InvalidRequest
from edgespec.server.fields import FEW, MANY, Body, ModelName, Name, Stops, Tokens
from edgespec.server.generation_spec import Choice, GenerationSpec, Settings, message
from edgespec.server.http import event_of
from edgespec.server.response import Done, Part, ReasoningDelta, Started, TextDelta, ToolCallDelta
from edgespec.server.tools import Tool
from edgespec.text.chat_template import Message


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
    role: Literal["user", "assistant"]
    content: str | Annotated[list[Block], MANY]

    def messages(self) -> Iterator[Message]:
        """One, and one more for each result of a tool. Raises InvalidRequest."""
        if isinstance(self.content, str):
            yield message(self.role, self.content)
            return
        text, thoughts, calls = "", "", list[dict[str, Any]]()
        for block in self.content:
            if isinstance(block, ResultBlock):
                yield message("tool", _text(block.content), tool_call_id=block.tool_use_id)
            elif isinstance(block, UseBlock):
                function = {"name": block.name, "arguments": block.input}
                calls.append({"id": block.id, "type": "function", "function": function})
            elif isinstance(block, ThinkingBlock):
                thoughts += block.thinking
            else:
                text += _text([block])
        if text or calls or not any(isinstance(block, ResultBlock) for block in self.content):
            yield message(self.role, text, tool_calls=calls or None, reasoning_content=thoughts or None)


class AnthropicTool(Body):
    name: Name
    description: str | None = None
    input_schema: dict[str, Any] = Field(default_factory=dict)

    def tool(self) -> Tool:
        return Tool(self.name, self.description or "", self.input_schema or {"type": "object"})


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class CountRequest(Body):
    """The body of /v1/messages/count_tokens."""

    model: ModelName
    messages: Annotated[list[AnthropicMessage], MANY, Field(min_length=1)]
    system: str | Annotated[list[TextBlock], MANY] | None = None
    tools: Annotated[list[AnthropicTool], FEW] | None = None
    tool_choice: ToolChoice | None = None

    def prompt(self) -> tuple[Message, ...]:
        """Raises InvalidRequest."""
        system = _text(self.system)
        said = [each for turn in self.messages for each in turn.messages()]
        return (*((message("system", system),) if system else ()), *said)

    def generation_spec(self) -> GenerationSpec:
        """Raises InvalidRequest."""
        wanted = self.tool_choice or ToolChoice(type="auto")
        choice: Choice = {"auto": "auto", "any": "required", "tool": "auto", "none": "none"}[wanted.type]  # type: ignore[assignment]
        tools = tuple(each.tool() for each in self.tools or ())
        if wanted.type == "tool" and wanted.name is None:
            raise InvalidRequest("tool_choice names no tool.", hint="Give its name.")
        forced = wanted.name if wanted.type == "tool" else None
        several = None if wanted.disable_parallel_tool_use is None else not wanted.disable_parallel_tool_use
        return GenerationSpec(self.prompt(), tools=tools, choice=choice, forced=forced, several=several)


class MessagesRequest(CountRequest):
    """The body of /v1/messages."""

    max_tokens: Tokens
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    stop_sequences: Stops | None = None
    stream: bool | None = False
    n: Literal[1] = 1

    def writer(self) -> MessagesWriter:
        return MessagesWriter(self.model)

    def generation_spec(self) -> GenerationSpec:
        """Raises InvalidRequest."""
        asked = super().generation_spec()
        settings = Settings(self.temperature, self.top_p, self.top_k)
        return replace(asked, settings=settings, max_tokens=self.max_tokens, stop=tuple(self.stop_sequences or ()))


class MessagesWriter:
    """One message, whole or as events."""

    def __init__(self, model: str) -> None:
        self._head = {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant", "model": model}
        self._blocks: list[dict[str, Any]] = []
        self._open = False  # whether the last block may grow
        self._end: Done | None = None

    def add(self, index: int, part: Part) -> None:
        if isinstance(part, TextDelta) and not self._continues("text"):
            self._blocks.append({"type": "text", "text": ""})
        elif isinstance(part, ReasoningDelta) and not self._continues("thinking"):
            self._blocks.append({"type": "thinking", "thinking": "", "signature": ""})
        if isinstance(part, TextDelta):
            self._blocks[-1]["text"] += part.text
        elif isinstance(part, ReasoningDelta):
            self._blocks[-1]["thinking"] += part.text
        elif isinstance(part, ToolCallDelta):
            self._blocks.append(_use(part))
        elif isinstance(part, Done):
            self._end = part

    def response_body(self) -> dict[str, Any]:
        assert self._end is not None
        return {**self._head, "content": self._blocks, **_ending(self._end),
                "usage": _usage(self._end.metrics),
                "timings": self._end.timings()}  # fmt: skip

    def chunks(self, index: int, part: Part) -> Iterator[bytes]:
        if isinstance(part, Started):
            opening: dict[str, Any] = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None,
                       "usage": _tokens(part.prompt_tokens, part.cached_tokens, 0)}  # fmt: skip
            yield _event("message_start", message=opening)
        elif isinstance(part, TextDelta):
            if not self._continues("text"):
                yield from self._begin({"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": part.text})
        elif isinstance(part, ReasoningDelta):
            if not self._continues("thinking"):
                yield from self._begin({"type": "thinking", "thinking": "", "signature": ""})
            yield self._delta({"type": "thinking_delta", "thinking": part.text})
        elif isinstance(part, ToolCallDelta):
            use = _use(part)
            yield from self._begin({**use, "input": {}})
            yield self._delta({"type": "input_json_delta", "partial_json": json.dumps(use["input"])})
        elif isinstance(part, Done):
            yield from self._close()
            yield _event("message_delta", delta=_ending(part), timings=part.timings(),
                         usage=_usage(part.metrics))  # fmt: skip

    def finish(self) -> Iterator[bytes]:
        yield _event("message_stop")

    def _continues(self, kind: str) -> bool:
        return bool(self._blocks) and self._blocks[-1]["type"] == kind

    def _begin(self, block: dict[str, Any]) -> Iterator[bytes]:
        yield from self._close()
        self._blocks.append(block)
        self._open = True
        yield _event("content_block_start", index=len(self._blocks) - 1, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=len(self._blocks) - 1, delta=delta)

    def _close(self) -> Iterator[bytes]:
        if self._open:
            self._open = False
            yield _event("content_block_stop", index=len(self._blocks) - 1)


def _event(kind: str, **data: Any) -> bytes:
    return event_of({"type": kind, **data}, kind)


def _use(part: ToolCallDelta) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"toolu_{secrets.token_hex(12)}", "name": part.call.name,
            "input": json.loads(part.call.arguments)}  # fmt: skip


def _ending(end: Done) -> dict[str, str | None]:
    if end.stop is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": end.stop}
    reasons = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
    return {"stop_reason": reasons[end.reason], "stop_sequence": None}


def _text(content: str | list[Any] | None) -> str:
    """Raises InvalidRequest for what is not text."""
    if content is None or isinstance(content, str):
        return content or ""
    for block in content:
        if not isinstance(block, TextBlock):
            raise InvalidRequest(f"this server reads text only, no '{block.type}'.", hint="Leave that block out.")
    return "".join(block.text for block in content)


def _usage(metrics: Metrics) -> dict[str, int]:
    return _tokens(metrics.prompt_tokens, metrics.cached_tokens, metrics.emitted_tokens)


def _tokens(prompt: int, cached: int, emitted: int) -> dict[str, int]:
    """As Anthropic counts: the part of the prompt that had been read before is told apart."""
    return {"input_tokens": prompt - cached, "cache_read_input_tokens": cached, "cache_creation_input_tokens": 0,
            "output_tokens": emitted}  # fmt: skip
