"""OpenAI's chat interface, /v1/chat/completions, and /v1/completions: raw text, without a chat template."""

from __future__ import annotations

import time
from abc import abstractmethod
from codecs import IncrementalDecoder, getincrementaldecoder
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import accumulate
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, BeforeValidator, ConfigDict, Field, Json, StringConstraints

from edgespec import __version__
from edgespec.answers.generation_spec import GenerationSpec, ToolChoiceMode, make_message, split_start
from edgespec.answers.response import Done, Part, Started, count_usage, new_id
from edgespec.answers.thinking import Effort
from edgespec.answers.tools import format_call, parse_arguments
from edgespec.core.metrics import Reading
from edgespec.engine.events import Gap, PromptScores, TokenPrompt
from edgespec.engine.repetition import RepetitionDetection
from edgespec.engine.structure import (
    Structure,
    choice_structure,
    grammar_structure,
    json_structure,
    regex_structure,
)
from edgespec.errors import InvalidRequest
from edgespec.server.answers import Answer, Block, Event, Step, Writer, format_score
from edgespec.server.fields import (
    FEW,
    MANY,
    Body,
    ContentPart,
    FunctionTool,
    GenerationBody,
    Parts,
    ResponseFormat,
    Said,
    SamplingBody,
    Stop,
    Stops,
    ThinkingBody,
    Tokens,
    check_number,
    join_text,
)
from edgespec.server.media import warn_of_media
from edgespec.text.chat_template import Message

TokenId = Annotated[str, StringConstraints(pattern=r"^\d{1,9}$")]
Bias = Annotated[float, BeforeValidator(check_number), Field(ge=-100, le=100)]
GrammarText = Annotated[str, StringConstraints(min_length=1, max_length=2**16)]
Choices = Annotated[
    list[Annotated[str, StringConstraints(min_length=1, max_length=4096)]], Field(min_length=1, max_length=256)
]


def _limit_length(value: object) -> object:
    """Reject a large mapping before each of its items is validated."""
    if isinstance(value, dict) and len(value) > 4096:
        raise ValueError("there are more than 4,096")
    return value


class StreamOptions(Body):
    include_usage: bool | None = False


class StructuredOutputs(Body):
    """vLLM's constraints. A JSON schema may be text."""

    model_config = ConfigDict(extra="forbid")

    json_: Json[dict[str, Any]] | dict[str, Any] | None = Field(default=None, alias="json")
    regex: GrammarText | None = None
    choice: Choices | None = None
    grammar: GrammarText | None = None


class RepetitionLimits(Body):
    """vLLM's limits of an answer that repeats itself."""

    model_config = ConfigDict(extra="forbid")

    max_pattern_size: Annotated[int, Field(ge=1)]
    min_count: Annotated[int, Field(ge=2)]
    min_pattern_size: Annotated[int, Field(ge=1)] = 1


class CompletionBody(SamplingBody, GenerationBody):
    """The fields that both interfaces share. `top_k`, `min_p`, `typical_p`, `repetition_penalty` and `return_progress`
    (events of a stream while the prompt is read) are extensions, named as in llama.cpp's server.

    At most one field constrains the answer: `response_format`, `grammar` and `json_schema` of llama.cpp's server, or
    one in `structured_outputs` of vLLM. Grammars are GBNF or llguidance's Lark.
    """

    synonyms: ClassVar[Mapping[str, str]] = {**SamplingBody.synonyms, "n_predict": "max_tokens"}

    # vLLM had these before structured_outputs.
    refused: ClassVar[tuple[str, ...]] = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")

    logit_bias: Annotated[dict[TokenId, Bias] | None, BeforeValidator(_limit_length)] = None
    stop: Stop | Stops | None = None
    n: Annotated[int, Field(ge=1, le=16)] | None = None
    stream_options: StreamOptions | None = None
    return_progress: bool | None = None
    response_format: ResponseFormat | None = None
    grammar: GrammarText | None = None
    json_schema: dict[str, Any] | bool | None = None
    structured_outputs: StructuredOutputs | None = None
    repetition_detection: RepetitionLimits | None = None

    def structure(self) -> Structure | None:
        """The constraint, if there is one. Raises InvalidRequest for two, and for one that cannot be read."""
        outputs = self.structured_outputs or StructuredOutputs()
        made = {
            "response_format": self.response_format.structure() if self.response_format else None,
            "grammar": grammar_structure(self.grammar) if self.grammar else None,
            "json_schema": json_structure(self.json_schema) if self.json_schema is not None else None,
            "structured_outputs.json": json_structure(outputs.json_) if outputs.json_ is not None else None,
            "structured_outputs.regex": regex_structure(outputs.regex) if outputs.regex else None,
            "structured_outputs.choice": choice_structure(outputs.choice or ()),
            "structured_outputs.grammar": grammar_structure(outputs.grammar) if outputs.grammar else None,
        }
        found = {name: structure for name, structure in made.items() if structure and structure.alternatives}
        if len(found) > 1:
            raise InvalidRequest(f"{' and '.join(found)} both constrain the answer.", hint="Send one of them.")
        return next(iter(found.values()), None)

    def spec_fields(self) -> dict[str, Any]:
        """The fields of a GenerationSpec that chat and raw completions fill in the same way. Raises InvalidRequest."""
        bias = None if self.logit_bias is None else tuple((int(token), by) for token, by in self.logit_bias.items())
        limits = self.repetition_detection
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return {
            "settings": self.settings(logit_bias=bias),
            "seed": self.seed,
            "stop": stops,
            "structure": self.structure(),
            "draft_max": self.draft_max,
            "repetition": RepetitionDetection(**limits.model_dump()) if limits is not None else None,
        }


_FINGERPRINT = f"edgespec-{__version__}"


class ChoicesWriter(Writer):
    """The answers to one request. Subclasses write the content of each choice."""

    last = b"data: [DONE]\n\n"

    def __init__(self, request: CompletionBody, kind: str, chunk_kind: str, id_prefix: str) -> None:
        """`kind` and `chunk_kind`: the value of `object` in the whole answer and in chunks."""
        super().__init__()
        self._wants_usage = bool(request.stream_options and request.stream_options.include_usage)
        self._head = {
            "id": new_id(id_prefix),
            "object": kind,
            "created": int(time.time()),
            "model": request.model,
            "system_fingerprint": _FINGERPRINT,
        }
        self._chunk_kind = chunk_kind
        self._copies = request.n or 1
        self._wants_progress = bool(request.return_progress)

    def events(self, index: int, part: Part) -> Iterator[Event]:
        yield from super().events(index, part)
        if isinstance(part, Reading) and self._wants_progress:
            at = part.progress
            counts = {
                "total": at.total,
                "cache": at.reused,
                "processed": at.done,
                "time_ms": round(part.seconds * 1000),
            }
            yield self._chunk([], prompt_progress=counts)

    def finish(self) -> Iterator[Event]:
        if self._wants_usage:
            yield self._chunk([], usage=count_usage(self._ends(), self._copies))

    def response_body(self) -> dict[str, Any]:
        choices = [self.choice(index, answer) for index, answer in sorted(self.answers.items())]
        ends = self._ends()
        return {**self._head, "choices": choices, "usage": count_usage(ends, self._copies), **ends[0].extensions()}

    @abstractmethod
    def choice(self, index: int, answer: Answer) -> dict[str, Any]:
        """The whole answer as an entry of `choices`."""

    def _ends(self) -> list[Done]:
        """The ends of the answers by index: they end in any order."""
        return [answer.end for _, answer in sorted(self.answers.items()) if answer.end is not None]

    def _chunk(self, choices: list[dict[str, Any]], **extra: Any) -> Event:
        usage = {"usage": None} if self._wants_usage else {}
        return {**self._head, "object": self._chunk_kind, "choices": choices, **usage, **extra}


def make_choice(
    index: int, content: dict[str, Any], reason: str | None = None, logprobs: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {"index": index, **content, "finish_reason": reason, "logprobs": logprobs}


class CalledFunction(Body):
    name: str
    arguments: str | dict[str, Any] | None = None


class PastCall(Body):
    """A call in the history: OpenAI's arguments are text, Ollama's an object."""

    id: str = ""
    function: CalledFunction

    def format(self) -> dict[str, Any]:
        arguments = self.function.arguments or "{}"
        parsed = parse_arguments(arguments) if isinstance(arguments, str) else arguments
        return format_call(self.id, self.function.name, parsed)


class ChatMessage(Body):
    """A message of OpenAI's chat or of Ollama's, which has other names for two fields, and `images`."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Parts | None = None
    images: Annotated[list[Any], FEW] | None = None
    name: str | None = Field(default=None, validation_alias=AliasChoices("name", "tool_name"))
    reasoning_content: str | None = Field(default=None, validation_alias=AliasChoices("reasoning_content", "thinking"))
    tool_calls: Annotated[list[PastCall], MANY] | None = None
    tool_call_id: str | None = None
    prefix: bool | None = None

    def said(self) -> Said:
        """The content with the images, which Ollama's messages have beside it."""
        if not self.images:
            return Said(self.role, self.content)
        texts = [ContentPart(type="text", text=self.content)] if isinstance(self.content, str) else self.content or []
        images = [ContentPart.model_validate({"type": "image", "data": image}) for image in self.images]
        return Said(self.role, [*texts, *images])

    def message(self) -> Message:
        return make_message(
            "system" if self.role == "developer" else self.role,
            join_text(self.said().content),
            name=self.name,
            tool_calls=[call.format() for call in self.tool_calls or ()] or None,
            tool_call_id=self.tool_call_id,
            reasoning_content=self.reasoning_content or None,
        )


class NamedFunction(Body):
    name: str


class NamedChoice(Body):
    type: Literal["function"]
    function: NamedFunction


class ChatRequest(ThinkingBody, CompletionBody):
    """The body of /v1/chat/completions.

    `continue_final_message` (vLLM) and `prefix` in the last message (DeepSeek, Mistral) continue a last message of the
    assistant. Without `add_generation_prompt` the prompt ends with the last message.
    """

    refused = (*CompletionBody.refused, "audio", "functions", "web_search_options")

    messages: Annotated[list[ChatMessage], MANY, Field(min_length=1)]
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    tools: Annotated[list[FunctionTool], FEW] | None = None
    tool_choice: ToolChoiceMode | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    modalities: Annotated[list[str], FEW] | None = None

    def writer(self) -> ChatWriter:
        return ChatWriter(self)

    def said(self) -> Iterator[Said]:
        return (each.said() for each in self.messages)

    def generation_spec(self) -> GenerationSpec:
        if set(self.modalities or ()) - {"text"}:
            raise InvalidRequest("answers are text only.", hint="Remove modalities.")
        choice = self.tool_choice
        messages, start = tuple(each.message() for each in self.messages), None
        if continues := bool(self.messages[-1].prefix or self.continue_final_message):
            messages, start = split_start(messages)
        given = self.chat_template_kwargs or {}
        is_on = given.get("enable_thinking")
        # A message that is continued stands behind the generation prompt.
        ends = {"add_generation_prompt": False} if self.add_generation_prompt is False and not continues else {}
        return GenerationSpec(
            prompt=messages,
            start=start,
            max_tokens=self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens,
            tools=tuple(each.function.tool() for each in self.tools or ()),
            tool_choice=choice if isinstance(choice, str) else "auto",
            forced_tool=choice.function.name if isinstance(choice, NamedChoice) else None,
            parallel_calls=self.parallel_tool_calls,
            top_logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            variables={**given, **ends},
            warnings=warn_of_media(self.said()),
            thinking=self.make_thinking(is_on=is_on if isinstance(is_on, bool) else None, effort=self.reasoning_effort),
            **self.spec_fields(),
        )


_FIELDS = {"text": "content", "reasoning": "reasoning_content"}


class ChatWriter(ChoicesWriter):
    def __init__(self, request: ChatRequest) -> None:
        super().__init__(request, "chat.completion", "chat.completion.chunk", "chatcmpl-")

    def write(self, index: int, step: Step) -> Iterator[Event]:
        match step:
            case Started():
                yield self._delta(index, {"role": "assistant", "content": ""})
            case "begin", Block(kind="call") as block, _:
                head = {"id": block.call_id(), "type": "function"}
                yield self._call_delta(index, block, {"name": block.name, "arguments": ""}, **head)
            case "grow", Block(kind="call") as block, text:
                yield self._call_delta(index, block, {"arguments": text})
            case "grow", block, text:
                yield self._delta(index, {_FIELDS[block.kind]: text})
            case Done():
                yield self._delta(index, {}, step.reason, **step.extensions())

    def choice(self, index: int, answer: Answer) -> dict[str, Any]:
        assert answer.end is not None
        calls = [format_call(each.call_id(), each.name, each.text) for each in answer.calls]
        text, reasoning = answer.join("text"), answer.join("reasoning")
        message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return make_choice(index, {"message": message}, answer.end.reason, _wrap_scores(answer.scores))

    def _call_delta(self, index: int, block: Block, function: dict[str, Any], **head: str) -> Event:
        return self._delta(index, {"tool_calls": [{"index": block.number, **head, "function": function}]})

    def _delta(self, index: int, delta: dict[str, Any], reason: str | None = None, **extra: Any) -> Event:
        choice = make_choice(index, {"delta": delta}, reason, _wrap_scores(self.take_scores(index)))
        return self._chunk([choice], **extra)


def _wrap_scores(scores: list[dict[str, Any]]) -> dict[str, Any] | None:
    return {"content": scores, "refusal": None} if scores else None


_Decoder = partial(getincrementaldecoder("utf-8"), "replace")
_DEFAULT_MAX_TOKENS = 16  # OpenAI's default
_MAX_ANSWERS = 128
TokenIds = Annotated[
    list[Annotated[int, Field(strict=True, ge=0)]], Field(min_length=1, max_length=2**20, fail_fast=True)
]


class CompletionRequest(CompletionBody):
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
        """The prompts, each as text or as token ids."""
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
            max_tokens=_DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens,
            top_logprobs=self.logprobs,
            scores_prompt=bool(self.echo) and self.logprobs is not None,
            **self.spec_fields(),
        )


class CompletionWriter(ChoicesWriter):
    def __init__(self, request: CompletionRequest) -> None:
        super().__init__(request, "text_completion", "text_completion", "cmpl-")
        texts = [each if isinstance(each, str) else "" for each in request.prompts()]
        self._echoes = texts if request.echo else [""] * len(texts)
        self._texts: dict[int, str] = {}
        self._decoders: defaultdict[int, IncrementalDecoder] = defaultdict(_Decoder)  # of the tokens sent so far

    def events(self, index: int, part: Part) -> Iterator[Event]:
        if isinstance(part, PromptScores):
            scores = self.answers[index].scores
            if part.first is not None:  # nothing comes before it, so it has no logprob
                token = part.first.decode("utf-8", "replace")
                scores.append({"token": token, "logprob": None, "bytes": list(part.first), "top_logprobs": None})
            scores += map(format_score, part.tokens)
            repeated = b"".join(bytes(score["bytes"]) for score in scores).decode("utf-8", "replace")
            yield self._add_text(index, self._echoes[index // self._copies] or repeated)
        else:
            yield from super().events(index, part)

    def write(self, index: int, step: Step) -> Iterator[Event]:
        match step:
            case Started() if (echo := self._echoes[index // self._copies]) and index not in self._texts:
                yield self._add_text(index, echo)
            case "grow", _, text:
                yield self._add_text(index, text)
            case Done():
                yield self._add_text(index, "", step.reason, **step.extensions())

    def choice(self, index: int, answer: Answer) -> dict[str, Any]:
        assert answer.end is not None
        logprobs = _format_logprobs(answer.scores, 0, _Decoder())  # the prompt is among them if it is repeated
        return make_choice(index, {"text": self._texts[index]}, answer.end.reason, logprobs)

    def _add_text(self, index: int, text: str, reason: str | None = None, **extra: Any) -> Event:
        before = self._texts.get(index, "")
        self._texts[index] = before + text
        logprobs = _format_logprobs(self.take_scores(index), len(before), self._decoders[index])
        return self._chunk([make_choice(index, {"text": text}, reason, logprobs)], **extra)


def _format_logprobs(scores: list[dict[str, Any]], offset: int, decoder: IncrementalDecoder) -> dict[str, Any] | None:
    """The logprobs of consecutive tokens as parallel lists; `offset` is the number of characters before them.

    `decoder` has decoded the tokens before them: a character may have several tokens.
    """
    if not scores:
        return None
    lengths = [len(decoder.decode(bytes(score["bytes"]))) for score in scores]
    return {
        "tokens": [score["token"] for score in scores],
        "token_logprobs": [score["logprob"] for score in scores],
        "top_logprobs": [
            None if score["top_logprobs"] is None else {top["token"]: top["logprob"] for top in score["top_logprobs"]}
            for score in scores
        ],
        "text_offset": list(accumulate(lengths[:-1], initial=offset)),
    }
