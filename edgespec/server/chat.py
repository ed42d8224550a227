"""/v1/chat/completions: OpenAI's chat interface."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from edgespec.engine.events import Scored
from edgespec.errors import InvalidRequest
from edgespec.server.choices import ChoicesWriter, format_score, make_choice
from edgespec.server.fields import (
    FEW,
    MANY,
    Body,
    CompletionBody,
    FunctionTool,
    Name,
    Parts,
    ResponseFormat,
    Tokens,
    join_text,
)
from edgespec.service.generation_spec import GenerationSpec, ToolChoiceMode, make_message, parse_arguments
from edgespec.service.response import Done, Part, ReasoningDelta, Started, TextDelta, ToolCallDelta, new_id
from edgespec.service.tools import format_call
from edgespec.text.chat_template import Message


class CalledFunction(Body):
    name: str
    arguments: str = "{}"


class PastCall(Body):
    id: str = ""
    function: CalledFunction


class ChatMessage(Body):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Parts | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[PastCall], MANY] | None = None
    tool_call_id: str | None = None

    def message(self) -> Message:
        """Raises InvalidRequest."""
        calls = [
            format_call(call.id, call.function.name, parse_arguments(call.function.arguments))
            for call in self.tool_calls or ()
        ]
        return make_message(
            {"developer": "system", "function": "tool"}.get(self.role, self.role),
            join_text(self.content),
            name=self.name,
            tool_calls=calls or None,
            tool_call_id=self.tool_call_id,
            reasoning_content=self.reasoning_content,
        )


class NamedFunction(Body):
    name: Name


class NamedChoice(Body):
    type: Literal["function"]
    function: NamedFunction


class ChatRequest(CompletionBody):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], MANY, Field(min_length=1)]
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[FunctionTool], FEW] | None = None
    tool_choice: ToolChoiceMode | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def writer(self) -> ChatWriter:
        return ChatWriter(self)

    def generation_spec(self) -> GenerationSpec:
        """Raises InvalidRequest."""
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs.", hint="Set logprobs to true.")
        return GenerationSpec(
            prompt=tuple(each.message() for each in self.messages),
            settings=self.settings(),
            max_tokens=self.max_completion_tokens or self.max_tokens,
            seed=self.seed,
            stop=self.stops(),
            structure=self.response_format.structure() if self.response_format else None,
            tools=tuple(each.tool() for each in self.tools or ()),
            tool_choice=self.tool_choice if isinstance(self.tool_choice, str) else "auto",
            forced_tool=self.tool_choice.function.name if isinstance(self.tool_choice, NamedChoice) else None,
            parallel_calls=self.parallel_tool_calls,
            top_logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            variables=self.chat_template_kwargs or {},
        )


class ChatWriter(ChoicesWriter):
    """The answers to one request, as a body or as chunks."""

    def __init__(self, request: ChatRequest) -> None:
        super().__init__(request, {"object": "chat.completion", "id": new_id("chatcmpl-")}, "chat.completion.chunk")
        self._messages: dict[int, dict[str, Any]] = {}

    def add(self, index: int, part: Part) -> None:
        message = self._messages.setdefault(index, {"role": "assistant", "content": None, "refusal": None})
        if isinstance(part, TextDelta):
            message["content"] = (message["content"] or "") + part.text
        elif isinstance(part, ReasoningDelta):
            message["reasoning_content"] = message.get("reasoning_content", "") + part.text
        elif isinstance(part, ToolCallDelta):
            message.setdefault("tool_calls", []).append(_format_delta(part))
        elif isinstance(part, Scored):
            self._scores.setdefault(index, []).append(format_score(part))
        elif isinstance(part, Done):
            self._ends[index] = part

    def response_body(self) -> dict[str, Any]:
        choices = []
        for i, message in sorted(self._messages.items()):
            content = message["content"] or (None if "tool_calls" in message else "")
            logprobs = {"content": self._scores[i], "refusal": None} if i in self._scores else None
            choices.append(make_choice(i, {"message": {**message, "content": content}}, self._ends[i].reason, logprobs))
        return self._body(choices)

    def chunks(self, index: int, part: Part) -> Iterator[bytes]:
        if isinstance(part, Started):
            yield self._delta(index, {"role": "assistant", "content": ""})
        elif isinstance(part, TextDelta):
            yield self._delta(index, {"content": part.text})
        elif isinstance(part, ReasoningDelta):
            yield self._delta(index, {"reasoning_content": part.text})
        elif isinstance(part, ToolCallDelta):
            yield self._delta(index, {"tool_calls": [{"index": part.index, **_format_delta(part)}]})
        elif isinstance(part, Scored):
            yield self._delta(index, {}, logprobs={"content": [format_score(part)], "refusal": None})
        else:
            self._ends[index] = part
            yield self._delta(index, {}, part.reason, timings=part.timings())

    def _delta(
        self,
        index: int,
        delta: dict[str, Any],
        reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
        **extra: Any,
    ) -> bytes:
        usage = {"usage": None} if self._wants_usage else {}
        return self._chunk([make_choice(index, {"delta": delta}, reason, logprobs)], **usage, **extra)


def _format_delta(part: ToolCallDelta) -> dict[str, Any]:
    return format_call(new_id("call_"), part.call.name, part.call.arguments)
