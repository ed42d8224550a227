"""/v1/chat/completions: OpenAI's chat interface."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from edgespec import __version__
from edgespec.engine.events import Scored
from edgespec.errors import InvalidRequest
from edgespec.server.fields import FEW, MANY, Body, FunctionTool, Name, Parts, ResponseFormat, Sampled, Tokens, joined
from edgespec.server.generation_spec import Choice, GenerationSpec, loaded_arguments, message
from edgespec.server.http import DONE, event_of
from edgespec.server.response import Done, Part, ReasoningDelta, Started, TextDelta, ToolCallDelta, usage_of
from edgespec.text.chat_template import Message

FINGERPRINT = f"edgespec-{__version__}"


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
        role = {"developer": "system", "function": "tool"}.get(self.role, self.role)
        calls = [
            {"id": call.id, "type": "function",
             "function": {"name": call.function.name, "arguments": loaded_arguments(call.function.arguments)}}
            for call in self.tool_calls or ()
        ]  # fmt: skip
        return message(
            role,
            joined(self.content),
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


class ChatRequest(Sampled):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], MANY, Field(min_length=1)]
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[FunctionTool], FEW] | None = None
    tool_choice: Choice | NamedChoice | None = None
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
        named = self.tool_choice.function.name if isinstance(self.tool_choice, NamedChoice) else None
        choice = self.tool_choice if isinstance(self.tool_choice, str) else None
        tools = tuple(each.tool() for each in self.tools or ())
        return GenerationSpec(
            prompt=tuple(each.message() for each in self.messages),
            settings=self.settings(),
            max_tokens=self.max_completion_tokens or self.max_tokens,
            seed=self.seed,
            stop=self.stops(),
            structure=self.response_format.structure() if self.response_format else None,
            tools=tools,
            choice=choice or "auto",
            forced=named,
            several=self.parallel_tool_calls,
            top_logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            variables=self.chat_template_kwargs or {},
        )


class ChatWriter:
    """The answers to one call, whole or as events."""

    def __init__(self, request: ChatRequest) -> None:
        self._wants_usage = request.wants_usage
        self._head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": request.model,
                      "system_fingerprint": FINGERPRINT}  # fmt: skip
        self._messages: dict[int, dict[str, Any]] = {}
        self._scores: dict[int, list[dict[str, Any]]] = {}
        self._ends: dict[int, Done] = {}

    def add(self, index: int, part: Part) -> None:
        made = self._messages.setdefault(index, {"role": "assistant", "content": None, "refusal": None})
        if isinstance(part, TextDelta):
            made["content"] = (made["content"] or "") + part.text
        elif isinstance(part, ReasoningDelta):
            made["reasoning_content"] = made.get("reasoning_content", "") + part.text
        elif isinstance(part, ToolCallDelta):
            made.setdefault("tool_calls", []).append(_call(part))
        elif isinstance(part, Scored):
            self._scores.setdefault(index, []).append(scored(part))
        elif isinstance(part, Done):
            self._ends[index] = part

    def response_body(self) -> dict[str, Any]:
        choices = [
            {"index": i, "message": {**made, "content": made["content"] or (None if "tool_calls" in made else "")},
             "finish_reason": self._ends[i].reason,
             "logprobs": {"content": self._scores[i], "refusal": None} if i in self._scores else None}
            for i, made in sorted(self._messages.items())
        ]  # fmt: skip
        ends = list(self._ends.values())
        return {"object": "chat.completion", **self._head, "choices": choices, "usage": usage_of(ends),
                "timings": ends[0].timings()}  # fmt: skip

    def chunks(self, index: int, part: Part) -> Iterator[bytes]:
        if isinstance(part, Started):
            yield self._event(index, {"role": "assistant", "content": ""})
        elif isinstance(part, TextDelta):
            yield self._event(index, {"content": part.text})
        elif isinstance(part, ReasoningDelta):
            yield self._event(index, {"reasoning_content": part.text})
        elif isinstance(part, ToolCallDelta):
            yield self._event(index, {"tool_calls": [{"index": part.index, **_call(part)}]})
        elif isinstance(part, Scored):
            yield self._event(index, {}, logprobs={"content": [scored(part)], "refusal": None})
        else:
            self._ends[index] = part
            yield self._event(index, {}, part.reason, timings=part.timings())

    def finish(self) -> Iterator[bytes]:
        if self._wants_usage:
            ends = list(self._ends.values())
            yield event_of({"object": "chat.completion.chunk", **self._head, "choices": [], "usage": usage_of(ends)})
        yield DONE

    def _event(
        self,
        index: int,
        delta: dict[str, Any],
        reason: str | None = None,
        *,
        logprobs: dict[str, Any] | None = None,
        **more: Any,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "finish_reason": reason, "logprobs": logprobs}
        usage = {"usage": None} if self._wants_usage else {}
        return event_of({"object": "chat.completion.chunk", **self._head, "choices": [choice], **usage, **more})


def scored(score: Scored) -> dict[str, Any]:
    """A token's scores, as OpenAI writes them."""
    return {**_token(score.text, score.logprob), "top_logprobs": [_token(text, logprob) for text, logprob in score.top]}


def _token(text: bytes, logprob: float) -> dict[str, Any]:
    return {"token": text.decode("utf-8", "replace"), "logprob": max(logprob, -9999.0), "bytes": list(text)}


def _call(part: ToolCallDelta) -> dict[str, Any]:
    function = {"name": part.call.name, "arguments": part.call.arguments}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
