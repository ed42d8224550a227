"""/v1/chat/completions: OpenAI's chat interface."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import accumulate
from typing import Annotated, Any, Literal

from pydantic import Field

from edgespec import __version__
from edgespec.engine.events import Gap, PromptScores, Scored, TokenPrompt
from edgespec.errors import InvalidRequest
from edgespec.server.controls import ConstrainedBody, DraftingBody, ThinkingBody
from edgespec.server.fields import (
    FEW,
    MANY,
    Body,
    CompletionBody,
    Function,
    FunctionTool,
    Parts,
    Tokens,
    join_text,
    refuse_fields,
)
from edgespec.server.http import DONE, format_event
from edgespec.service.generation_spec import (
    Effort,
    GenerationSpec,
    ToolChoiceMode,
    format_call,
    make_message,
    parse_arguments,
    split_start,
)
from edgespec.service.response import Done, Part, ReasoningDelta, Started, TextDelta, count_usage, new_id
from edgespec.text.chat_template import Message
from edgespec.text.tool_formats import CallDelta, CallEnd, CallStart

# The writer that /v1/chat/completions and /v1/completions share: one entry of `choices` for each answer.


_FINGERPRINT = f"edgespec-{__version__}"
_MIN_LOGPROB = -9999.0  # OpenAI's value for -inf, which JSON cannot hold


class ChoicesWriter:
    """The answers to one request, as a body or as chunks. Subclasses gather the content of each choice."""

    def __init__(self, request: CompletionBody, head: dict[str, Any], chunk_object: str) -> None:
        """`head`: the first fields of the body. `chunk_object`: the value of `object` in chunks."""
        self._wants_usage = request.wants_usage
        self._head = {
            **head,
            "created": int(time.time()),
            "model": request.model,
            "system_fingerprint": _FINGERPRINT,
        }
        self._chunk_object = chunk_object
        self._copies = request.n or 1
        self._scores: dict[int, list[dict[str, Any]]] = {}  # logprobs of a choice, one entry per token
        self._ends: dict[int, Done] = {}

    def finish(self) -> Iterator[bytes]:
        """The last chunks: usage if the client asked for it, then the end of the stream."""
        if self._wants_usage:
            yield self._chunk([], usage=count_usage(self._ordered_ends(), self._copies))
        yield DONE

    def fail(self, error: dict[str, Any]) -> bytes:
        return format_event(error)

    def _body(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        ends = self._ordered_ends()
        return {**self._head, "choices": choices, "usage": count_usage(ends, self._copies), **ends[0].extensions()}

    def _ordered_ends(self) -> list[Done]:
        """The ends of the answers by index: they end in any order."""
        return [end for _, end in sorted(self._ends.items())]

    def _chunk(self, choices: list[dict[str, Any]], **extra: Any) -> bytes:
        return format_event({**self._head, "object": self._chunk_object, "choices": choices, **extra})


def make_choice(
    index: int, content: dict[str, Any], reason: str | None = None, logprobs: dict[str, Any] | None = None
) -> dict[str, Any]:
    """One entry of `choices`."""
    return {"index": index, **content, "finish_reason": reason, "logprobs": logprobs}


def format_score(score: Scored) -> dict[str, Any]:
    """The logprobs of one token in the form of /v1/chat/completions."""
    top = [_format_token(text, logprob) for text, logprob in score.top]
    return {**_format_token(score.text, score.logprob), "top_logprobs": top}


def _format_token(text: bytes, logprob: float) -> dict[str, Any]:
    return {"token": text.decode("utf-8", "replace"), "logprob": max(logprob, _MIN_LOGPROB), "bytes": list(text)}


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


# /v1/completions: OpenAI's interface to raw text completion, without a chat template.


_DEFAULT_MAX_TOKENS = 16  # OpenAI's default
_MAX_ANSWERS = 128
TokenIds = Annotated[
    list[Annotated[int, Field(strict=True, ge=0)]], Field(min_length=1, max_length=2**20, fail_fast=True)
]


class CompletionRequest(ConstrainedBody, DraftingBody):
    """The body of /v1/completions. All constraints are extensions."""

    prompt: str | TokenIds | Annotated[list[str | TokenIds], Field(min_length=1, max_length=128, fail_fast=True)]
    max_tokens: Tokens | None = None
    echo: bool | None = False
    suffix: str | None = None
    best_of: int | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    def writer(self) -> CompletionWriter:
        return CompletionWriter(self)

    def prompts(self) -> list[str | tuple[int, ...]]:
        """Each a text or token ids."""
        prompts: Any = self.prompt
        if isinstance(prompts, str) or isinstance(prompts[0], int):
            prompts = [prompts]
        return [each if isinstance(each, str) else tuple(each) for each in prompts]

    def generation_specs(self) -> list[GenerationSpec]:
        """One for each prompt. Raises InvalidRequest."""
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise InvalidRequest("best_of is not supported.", hint="Remove best_of.")
        prompts = self.prompts()
        if len(prompts) * (self.n or 1) > _MAX_ANSWERS:
            raise InvalidRequest(f"more than {_MAX_ANSWERS} answers are asked for.", hint="Send fewer prompts.")
        if self.echo and self.logprobs is None and not all(isinstance(each, str) for each in prompts):
            raise InvalidRequest("echo of token ids needs logprobs.", hint="Set logprobs to 0.")
        return [self._spec(prompt) for prompt in prompts]

    def _spec(self, prompt: str | tuple[int, ...]) -> GenerationSpec:
        if self.suffix and not isinstance(prompt, str):
            raise InvalidRequest("suffix needs a prompt as text.", hint="Send the prompt as text.")
        text = Gap(prompt, self.suffix) if self.suffix and isinstance(prompt, str) else prompt
        return GenerationSpec(
            prompt=TokenPrompt(text) if isinstance(text, tuple) else text,
            settings=self.settings(),
            max_tokens=_DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens,
            seed=self.seed,
            stop=self.stops(),
            structure=self.structure(),
            top_logprobs=self.logprobs,
            scores_prompt=bool(self.echo) and self.logprobs is not None,
            draft_length=self.draft_length(),
        )


class CompletionWriter(ChoicesWriter):
    """The answers to one request, as a body or as chunks."""

    def __init__(self, request: CompletionRequest) -> None:
        super().__init__(request, {"id": new_id("cmpl-"), "object": "text_completion"}, "text_completion")
        texts = [each if isinstance(each, str) else "" for each in request.prompts()]
        self._echoes = texts if request.echo else [""] * len(texts)
        self._texts: dict[int, str] = {}
        self._offsets: dict[int, int] = {}  # characters before the next token's logprobs

    def _echo(self, index: int) -> str:
        """The prompt of an answer, if it is repeated; that of token ids comes with their scores."""
        return self._echoes[index // self._copies]

    def add(self, index: int, part: Part) -> None:
        self._texts.setdefault(index, self._echo(index))
        if isinstance(part, TextDelta | ReasoningDelta):
            self._texts[index] += part.text
        elif isinstance(part, PromptScores):
            self._scores[index] = _format_prompt(part)
            self._texts[index] = self._texts[index] or _join(self._scores[index])
        elif isinstance(part, Scored):
            self._scores.setdefault(index, []).append(format_score(part))
        elif isinstance(part, Done):
            self._ends[index] = part

    def response_body(self) -> dict[str, Any]:
        return self._body([self._choice(index, text) for index, text in sorted(self._texts.items())])

    def _choice(self, index: int, text: str) -> dict[str, Any]:
        scores, logprobs = self._scores.get(index), None
        if scores is not None:
            logprobs = _format_logprobs(scores, 0)  # the prompt is among them where it is repeated
        return make_choice(index, {"text": text}, self._ends[index].reason, logprobs)

    def chunks(self, index: int, part: Part) -> Iterator[bytes]:
        if isinstance(part, PromptScores):
            scores = _format_prompt(part)
            text = self._echo(index) or _join(scores)
            self._offsets[index] = len(text)
            yield self._text_chunk(index, text, logprobs=_format_logprobs(scores, 0))
        elif isinstance(part, Started) and index not in self._offsets:
            self._offsets[index] = len(echo := self._echo(index))
            if echo:
                yield self._text_chunk(index, echo)
        elif isinstance(part, TextDelta | ReasoningDelta):
            yield self._text_chunk(index, part.text, logprobs=self._take_scores(index))
        elif isinstance(part, Scored):
            self._scores.setdefault(index, []).append(format_score(part))
        elif isinstance(part, Done):
            self._ends[index] = part
            yield self._text_chunk(index, "", part.reason, self._take_scores(index), **part.extensions())

    def _take_scores(self, index: int) -> dict[str, Any] | None:
        """The logprobs of the tokens whose text is about to be sent."""
        if (scores := self._scores.pop(index, None)) is None:
            return None
        offset = self._offsets[index]
        self._offsets[index] += len(_join(scores))
        return _format_logprobs(scores, offset)

    def _text_chunk(
        self, index: int, text: str, reason: str | None = None, logprobs: dict[str, Any] | None = None, **extra: Any
    ) -> bytes:
        return self._chunk([make_choice(index, {"text": text}, reason, logprobs)], **extra)


def _format_prompt(scores: PromptScores) -> list[dict[str, Any]]:
    """The logprobs of the prompt's tokens; one that nothing comes before has none."""
    if scores.first is None:
        return list(map(format_score, scores.tokens))
    first = {"token": scores.first.decode("utf-8", "replace"), "logprob": None, "top_logprobs": None}
    return [first, *map(format_score, scores.tokens)]


def _join(scores: list[dict[str, Any]]) -> str:
    return "".join(score["token"] for score in scores)


def _format_logprobs(scores: list[dict[str, Any]], offset: int) -> dict[str, Any]:
    """The logprobs of consecutive tokens as parallel lists; `offset` is the number of characters before them."""
    tokens = [score["token"] for score in scores]
    return {
        "tokens": tokens,
        "token_logprobs": [score["logprob"] for score in scores],
        "top_logprobs": [
            None if score["top_logprobs"] is None else {top["token"]: top["logprob"] for top in score["top_logprobs"]}
            for score in scores
        ],
        "text_offset": list(accumulate(map(len, tokens[:-1]), initial=offset)),
    }
