"""/v1/chat/completions: OpenAI's chat interface."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from edgespec.engine.events import Scored
from edgespec.errors import InvalidRequest
from edgespec.server.choices import ChoicesWriter, format_score, make_choice
from edgespec.server.constraints import ConstrainedBody
from edgespec.server.control_fields import DraftingBody, ThinkingBody
from edgespec.server.fields import (
    FEW,
    MANY,
    Body,
    Function,
    FunctionTool,
    Parts,
    Tokens,
    join_text,
    refuse_fields,
)
from edgespec.service.generation_spec import GenerationSpec, ToolChoiceMode, make_message, parse_arguments, split_start
from edgespec.service.response import Done, Part, ReasoningDelta, Started, TextDelta, new_id
from edgespec.service.thinking import Effort
from edgespec.service.tools import format_call
from edgespec.text.chat_template import Message
from edgespec.text.tool_formats import CallDelta, CallEnd, CallStart


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
    function_call: CalledFunction | None = None
    tool_call_id: str | None = None
    prefix: bool | None = None

    def message(self) -> Message:
        """Raises InvalidRequest."""
        past = self.tool_calls or ([PastCall(function=self.function_call)] if self.function_call else ())
        calls = [format_call(call.id, call.function.name, parse_arguments(call.function.arguments)) for call in past]
        return make_message(
            {"developer": "system", "function": "tool"}.get(self.role, self.role),
            join_text(self.content),
            name=self.name,
            tool_calls=calls or None,
            tool_call_id=self.tool_call_id,
            reasoning_content=self.reasoning_content,
        )


class NamedFunction(Body):
    name: str


class NamedChoice(Body):
    type: Literal["function"]
    function: NamedFunction


class ChatRequest(ConstrainedBody, DraftingBody, ThinkingBody):
    """The body of /v1/chat/completions.

    `functions` and `function_call` are OpenAI's first form of tools. `continue_final_message` (vLLM) and `prefix` in
    the last message (DeepSeek, Mistral) continue a last message of the assistant. Without `add_generation_prompt` the
    prompt ends with the last message.
    """

    messages: Annotated[list[ChatMessage], MANY, Field(min_length=1)]
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    tools: Annotated[list[FunctionTool], FEW] | None = None
    tool_choice: ToolChoiceMode | NamedChoice | None = None
    functions: Annotated[list[Function], FEW] | None = None
    function_call: Literal["auto", "none"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    modalities: Annotated[list[str], FEW] | None = None
    audio: Any = None
    web_search_options: Any = None

    def writer(self) -> ChatWriter:
        return ChatWriter(self)

    def generation_specs(self) -> list[GenerationSpec]:
        """Raises InvalidRequest."""
        return [self.generation_spec()]

    def generation_spec(self) -> GenerationSpec:
        """Raises InvalidRequest."""
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs.", hint="Set logprobs to true.")
        if set(self.modalities or ()) - {"text"}:
            raise InvalidRequest("answers are text only.", hint="Remove modalities.")
        refuse_fields(self, "audio", "web_search_options")
        if (self.functions or self.function_call) and (self.tools or self.tool_choice):
            raise InvalidRequest("functions cannot be combined with tools.", hint="Send tools only.")
        choice = self.function_call or self.tool_choice
        named = choice.function if isinstance(choice, NamedChoice) else choice
        messages, start = tuple(each.message() for each in self.messages), None
        if self._continues():
            messages, start = split_start(messages)
        return GenerationSpec(
            prompt=messages,
            start=start,
            settings=self.settings(),
            max_tokens=self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens,
            seed=self.seed,
            stop=self.stops(),
            structure=self.structure(),
            tools=tuple(each.tool() for each in self.functions or [each.function for each in self.tools or ()]),
            tool_choice=choice if isinstance(choice, str) else "auto",
            forced_tool=named.name if isinstance(named, NamedFunction) else None,
            parallel_calls=False if self.functions else self.parallel_tool_calls,
            top_logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            variables=self._variables(),
            draft_length=self.draft_length(),
            thinking=self.make_thinking(is_on=self._switch(), effort=self.reasoning_effort),
        )

    def _switch(self) -> bool | None:
        """Whether the variables of the chat template turn the reasoning on or off."""
        given = (self.chat_template_kwargs or {}).get("enable_thinking")
        return given if isinstance(given, bool) else None

    def _variables(self) -> dict[str, Any]:
        """What the chat template may read. A message that is continued stands behind the generation prompt."""
        given = self.chat_template_kwargs or {}
        ends = self.add_generation_prompt is False and not self._continues()
        return {**given, "add_generation_prompt": False} if ends else given

    def _continues(self) -> bool:
        """Whether the answer continues the last message. Raises InvalidRequest for contradictory fields."""
        *before, last = self.messages
        if any(message.prefix for message in before):
            raise InvalidRequest("prefix belongs to the last message.", hint="Remove the others.")
        if last.prefix and self.continue_final_message is False:
            raise InvalidRequest("prefix and continue_final_message contradict each other.", hint="Send one of them.")
        continues = bool(last.prefix or self.continue_final_message)
        if self.add_generation_prompt and continues:
            raise InvalidRequest(
                "add_generation_prompt and continue_final_message contradict each other.",
                hint="Leave add_generation_prompt out.",
            )
        return continues


class ChatWriter(ChoicesWriter):
    """The answers to one request, as a body or as chunks."""

    def __init__(self, request: ChatRequest) -> None:
        super().__init__(request, {"object": "chat.completion", "id": new_id("chatcmpl-")}, "chat.completion.chunk")
        self._messages: dict[int, dict[str, Any]] = {}
        self._has_functions = bool(request.functions)

    def add(self, index: int, part: Part) -> None:
        message = self._messages.setdefault(index, {"role": "assistant", "content": None, "refusal": None})
        if isinstance(part, TextDelta):
            message["content"] = (message["content"] or "") + part.text
        elif isinstance(part, ReasoningDelta):
            message["reasoning_content"] = message.get("reasoning_content", "") + part.text
        elif isinstance(part, CallEnd) and self._has_functions:
            message["function_call"] = {"name": part.call.name, "arguments": part.call.arguments}
        elif isinstance(part, CallEnd):
            call = format_call(new_id("call_"), part.call.name, part.call.arguments)
            message.setdefault("tool_calls", []).append(call)
        elif isinstance(part, Scored):
            self._scores.setdefault(index, []).append(format_score(part))
        elif isinstance(part, Done):
            self._ends[index] = part

    def response_body(self) -> dict[str, Any]:
        choices = []
        for i, message in sorted(self._messages.items()):
            content = message["content"] or (None if {"tool_calls", "function_call"} & set(message) else "")
            whole = {"message": {**message, "content": content}}
            choices.append(make_choice(i, whole, self._reason(self._ends[i]), self._take_scores(i)))
        return self._body(choices)

    def chunks(self, index: int, part: Part) -> Iterator[bytes]:
        if isinstance(part, Started):
            yield self._delta(index, {"role": "assistant", "content": ""})
        elif isinstance(part, TextDelta):
            yield self._delta(index, {"content": part.text})
        elif isinstance(part, ReasoningDelta):
            yield self._delta(index, {"reasoning_content": part.text})
        elif isinstance(part, CallStart):
            yield self._call_delta(index, part.index, part.name, id=new_id("call_"), type="function")
        elif isinstance(part, CallDelta):
            yield self._call_delta(index, part.index, None, part.arguments)
        elif isinstance(part, Scored):
            self._scores.setdefault(index, []).append(format_score(part))
        elif isinstance(part, Done):
            self._ends[index] = part
            yield self._delta(index, {}, self._reason(part), **part.extensions())

    def _call_delta(self, index: int, call: int, name: str | None, arguments: str = "", **head: str) -> bytes:
        """A part of a call's arguments, or its beginning with the name and `head`. Before there were tools, `functions`
        had calls without a head.
        """
        function = {"arguments": arguments} if name is None else {"name": name, "arguments": arguments}
        if self._has_functions:
            return self._delta(index, {"function_call": function})
        return self._delta(index, {"tool_calls": [{"index": call, **head, "function": function}]})

    def _take_scores(self, index: int) -> dict[str, Any] | None:
        """The logprobs of the tokens whose text is about to be sent."""
        scores = self._scores.pop(index, None)
        return None if scores is None else {"content": scores, "refusal": None}

    def _reason(self, end: Done) -> str:
        return "function_call" if self._has_functions and end.reason == "tool_calls" else end.reason

    def _delta(self, index: int, delta: dict[str, Any], reason: str | None = None, **extra: Any) -> bytes:
        usage = {"usage": None} if self._wants_usage else {}
        choice = make_choice(index, {"delta": delta}, reason, self._take_scores(index))
        return self._chunk([choice], **usage, **extra)
