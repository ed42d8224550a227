"""The fields that request bodies share, validated by pydantic. Unknown fields are ignored: clients send many."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar, get_args, get_origin

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails

from edgespec.answers.generation_spec import GenerationSpec
from edgespec.answers.thinking import Effort, Thinking
from edgespec.answers.tools import Tool, make_tool
from edgespec.engine.structure import Structure, is_shallow, json_structure
from edgespec.errors import InvalidRequest
from edgespec.options import OPTIONS
from edgespec.server.answers import Writer
from edgespec.units import parse_duration

_SAMPLING = {
    "temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty"
}  # fmt: skip
ModelName = Annotated[str, StringConstraints(min_length=1, max_length=512)]
AnyModelName = Annotated[
    str, StringConstraints(max_length=512), BeforeValidator(lambda name: "" if name is None else name)
]
"""Without a name, or with null, the only model of a server answers."""

Stop = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Stops = Annotated[list[Stop], Field(max_length=16, fail_fast=True)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


def within_limits(name: str) -> Any:
    """A Field with the range that an option has everywhere. Where an interface documents a narrower range, such as
    OpenAI's for the temperature, its fields state that instead.
    """
    low, high = OPTIONS[name].limits
    return Field(ge=low, le=high)


Temperature = Annotated[float, within_limits("temperature")]
RepetitionPenalty = Annotated[float, within_limits("repetition_penalty")]
NO_LIMIT = 2**31
"""The `max_tokens` of an answer that may go on to the end of the context."""

Tokens = Annotated[int, Field(ge=-1, le=NO_LIMIT), AfterValidator(lambda n: NO_LIMIT if n == -1 else n)]
"""Tokens of an answer. As in llama.cpp's server, 0 reads the prompt into the cache only, and -1 is no limit."""

FEW, MANY = Field(max_length=256, fail_fast=True), Field(max_length=4096, fail_fast=True)
"""Limits of a list's length. Without `fail_fast` pydantic reports every invalid item of a list of any length."""


def check_number(value: Any) -> Any:
    """`value`, unless it is a boolean. Raises ValueError."""
    if isinstance(value, bool):
        raise ValueError("a number is required, not a boolean")
    return value


class Body(BaseModel):
    """A JSON object of a request. Fields of numbers take no booleans, which pydantic would read as 0 and 1."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _check_number(cls, value: Any, info: ValidationInfo) -> Any:
        return check_number(value) if _is_number(cls, info.field_name or "") else value


@cache
def _is_number(body: type[BaseModel], field: str) -> bool:
    """Whether a field takes numbers and no booleans."""
    types, waiting = set[Any](), [body.model_fields[field].annotation]
    while waiting:
        each = waiting.pop()
        types.add(each)
        waiting += get_args(each) if get_origin(each) is not Literal else ()
    return not types.isdisjoint((int, float)) and bool not in types


class SamplingBody(Body):
    """Sampling parameters whose names and ranges are the same in all interfaces. Those of vLLM and llama.cpp's server
    are extensions of OpenAI's and Anthropic's.
    """

    synonyms: ClassVar[Mapping[str, str]] = {"repeat_penalty": "repetition_penalty"}
    """Other names of fields, which count if the field is not given."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, within_limits("top_p")] | None = None
    top_k: Annotated[int, within_limits("top_k")] | None = None
    min_p: Annotated[float, within_limits("min_p")] | None = None
    typical_p: Annotated[float, within_limits("typical_p")] | None = None
    repetition_penalty: RepetitionPenalty | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**64)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _take_synonyms(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        known = {field: value for name, field in cls.synonyms.items() if (value := given.get(name)) is not None}
        found = {field: -1 if value == -2 else value for field, value in known.items()}  # both are without a limit
        rest = {name: value for name, value in given.items() if name not in cls.synonyms and value is not None}
        return {**given, **found, **rest} if found else given

    def settings(self, **more: Any) -> dict[str, Any]:
        """The sampling settings for a GenerationSpec. `more`: those whose names differ between the interfaces."""
        return {**self.model_dump(include=_SAMPLING), **more}


_MAX_DURATION = 64  # characters


def _parse_keep_alive(value: Any) -> float:
    if not isinstance(value, int | float | str):
        raise ValueError("neither a number nor a duration")
    return parse_duration(str(value)[:_MAX_DURATION])


KeepAlive = Annotated[
    float, Field(allow_inf_nan=True), BeforeValidator(_parse_keep_alive, json_schema_input_type=float | str)
]
"""Seconds, or a duration such as "10m"; less than 0 is without end: `inf`."""


class ResidencyBody(Body):
    """A request that names a model, and how long that stays loaded: Ollama's `keep_alive`, LM Studio's `ttl`. What the
    last call has set counts until the model is unloaded.
    """

    keep_alive: KeepAlive | None = Field(default=None, validation_alias=AliasChoices("ttl", "keep_alive"))


class LoadRequest(ResidencyBody):
    """The body of /models/load."""

    model: ModelName


class UnloadRequest(Body):
    """The body of /models/unload. `now`: end the model's process, whatever it does; its requests fail."""

    model: ModelName
    now: bool = False


Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
Budget = Annotated[int, Field(ge=-1, le=2**31 - 1), AfterValidator(lambda n: None if n == -1 else n)]
"""Tokens of reasoning; -1 is no limit."""

_BUDGETS = AliasChoices("reasoning_budget_tokens", "thinking_budget_tokens", "thinking_token_budget")


# Fields of llama.cpp's server, vLLM and others that change the text there, and their values that change nothing.
_NOT_FOLLOWED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("ignore_eos", "min_tokens", "stop_token_ids", "bad_words", "use_beam_search"), ()),
    **dict.fromkeys(("xtc_probability", "dry_multiplier", "mirostat", "dynatemp_range", "adaptive_target"), ()),
    **dict.fromkeys(("top_a", "smoothing_factor", "no_repeat_ngram_size", "prompt_logprobs"), ()),
    "top_n_sigma": (-1,),
    "tfs_z": (1,),
    "length_penalty": (1,),
    "samplers": (),
    "sampler_order": (),
    "lora": (),
}


def warn_of_fields(given: Mapping[str, Any]) -> tuple[str, ...]:
    """A warning for each field that changes the text on other servers and is not followed here."""
    names = (name for name, neutral in _NOT_FOLLOWED.items() if given.get(name) and given[name] not in neutral)
    return tuple(f"{name} is ignored: this server does not have it." for name in names)


class GenerationBody(ResidencyBody, ABC):
    """The fields of all bodies that ask for `n` answers to each of their prompts, at once or as a stream.

    `draft_max`, llama.cpp's `speculative.n_max`, is the most tokens that are drafted at once. If `memory` is
    false, the memory neither keeps this call's texts nor drafts from earlier ones.
    """

    model_config = ConfigDict(extra="allow")

    refused: ClassVar[tuple[str, ...]] = ()
    """Fields that are not supported, and must not be ignored when the model runs here."""

    model: AnyModelName = ""
    stream: bool | None = False
    n: Annotated[int, Field(ge=1, le=1)] | None = 1
    draft_max: Count | None = Field(default=None, validation_alias=AliasChoices("draft_max", "speculative.n_max"))
    memory: bool | None = None

    def require_supported(self) -> None:
        """Raise InvalidRequest for a field that would have to be ignored."""
        for name in self.refused:
            if (self.model_extra or {}).get(name):
                raise InvalidRequest(f"{name} is not supported.", hint=f"Remove {name}.")

    @abstractmethod
    def writer(self) -> Writer:
        """Return a new Writer, which writes the answers in this interface."""

    def generation_spec(self) -> GenerationSpec:
        """What is asked of the engine. Raises InvalidRequest. A body with several prompts overrides `generation_specs`
        instead.
        """
        raise NotImplementedError

    def generation_specs(self) -> list[GenerationSpec]:
        """One for each prompt. Raises InvalidRequest."""
        self.require_supported()
        return [self.generation_spec()]

    def said(self) -> Iterator[Said]:
        """What the messages say, in their order; nothing where there are none."""
        return iter(())

    @property
    def warnings(self) -> tuple[str, ...]:
        """A sentence for each field that is not followed."""
        return warn_of_fields(self.model_extra or {})


class ThinkingBody(Body):
    """A limit of the reasoning, by its names in llama.cpp's server and vLLM."""

    reasoning_budget_tokens: Budget | None = Field(default=None, validation_alias=_BUDGETS)

    def make_thinking(self, *, is_on: bool | None = None, effort: Effort | None = None) -> Thinking:
        return Thinking(is_on, effort, self.reasoning_budget_tokens)


class EffortConfig(Body):
    effort: Effort | None = None


class JsonSchema(Body):
    name: str = "answer"
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """`schema` beside `json_object` is an extension of llama.cpp's server."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")

    def structure(self) -> Structure | None:
        if self.type == "text":
            return None
        if self.type == "json_object":
            return json_structure(self.schema_)
        if self.json_schema is None or self.json_schema.schema_ is None:
            raise InvalidRequest("response_format has no schema.", hint="Put the schema in json_schema.schema.")
        return json_structure(self.json_schema.schema_, is_strict=bool(self.json_schema.strict))


class Function(Body):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def tool(self) -> Tool:
        return make_tool(self.name, self.description, self.parameters, is_strict=bool(self.strict))


class FunctionTool(Body):
    type: Literal["function"]
    function: Function


_TEXTS = ("text", "input_text", "output_text", "refusal")
_IMAGES = ("image", "image_url", "input_image")
TEXT_ONLY = "the model reads text only"


class ContentPart(Body):
    """A part of a message, of which there are many types. Those that are not text keep their fields."""

    model_config = ConfigDict(extra="allow")

    type: str
    text: str = Field(default="", validation_alias=AliasChoices("text", "refusal"))

    @property
    def is_text(self) -> bool:
        return self.type in _TEXTS

    @property
    def kind(self) -> str:
        """What a user calls it, if it is not text."""
        return "image" if self.type in _IMAGES else self.type[:100]

    def dump(self) -> dict[str, Any]:
        """Its fields without `cache_control`, by which Claude Code says how far a prompt should be cached: it is in
        another place in each request.
        """
        return self.model_dump(exclude={"cache_control"})


Parts = Annotated[list[ContentPart], MANY]
Content = str | Sequence[ContentPart] | None


class Said(NamedTuple):
    """What a message, or a part of one, says. `role` is "tool" for results of tools."""

    role: str
    content: Content

    @property
    def pieces(self) -> list[str | ContentPart]:
        """Its texts, and the parts that are not text."""
        if self.content is None or isinstance(self.content, str):
            return [self.content or ""]
        return [part.text if part.is_text else part for part in self.content]


def join_text(content: Content) -> str:
    """The text of a message's content; its parts are lines, as in llama.cpp's server. A part that is not text is named
    in its place.
    """
    if content is None or isinstance(content, str):
        return content or ""
    return join_lines(part.text if part.is_text else f"[{part.kind} left out: {TEXT_ONLY}]" for part in content)


def join_lines(texts: Iterable[str]) -> str:
    """The texts that are not empty, with line breaks between them."""
    return "\n".join(filter(None, texts))


def require_fields(**fields: str) -> None:
    """Raise InvalidRequest if one of these fields is empty, which means that it was left out."""
    for name, value in fields.items():
        if not value:
            raise InvalidRequest(f"{name} is missing.", hint=f"Send {name}.")


B = TypeVar("B", bound=BaseModel)

_MAX_DEPTH = 128
_BOUNDS = ((b",", 2**20, "values"), (b"[{:", 2**17, "arrays, objects and keys"))
"""Characters, how many of them a body may have outside of strings, and what they stand for. Python's parser stops
everything else in this process until it has read all of a body.
"""

_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)


def parse_body(data: bytes, kind: type[B]) -> B:
    """The validated body. Raises InvalidRequest."""
    for marks, limit, name in _BOUNDS:
        if _count(data, marks) > limit and _count(_STRING.sub(b"", data), marks) > limit:
            raise InvalidRequest(f"the body has more than {limit:,} {name}.")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("the body is not valid JSON.", hint="Send a JSON object.") from error
    if not is_shallow(value, _MAX_DEPTH):
        raise InvalidRequest(f"the body is nested more than {_MAX_DEPTH} levels deep.")
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise InvalidRequest(
            f"{describe_fault(error, value)}.", hint="GET /openapi.json describes the body."
        ) from error


_WRONG_TYPE = ("_type", "_parsing", "literal_error")
_PYTHON = re.compile(r"^Value error, | or instance of \w+|, unable to .*| after validation, not \d+")


def describe_fault(error: ValidationError, value: Any) -> str:
    """The fault that lies deepest in `value`, without the values in it.

    If a field has several types, this is the fault of the type that the field comes nearest to.
    """
    errors = error.errors(include_input=False, include_url=False, include_context=False)
    deepest = _find_path(max(errors, key=lambda each: (len(_find_path(each, value)), len(each["loc"]))), value)
    faults = [each for each in errors if _find_path(each, value) == deepest]
    told = [each for each in faults if not each["type"].endswith(_WRONG_TYPE)] or faults
    first, *others = dict.fromkeys(_PYTHON.sub("", each["msg"]).replace("dictionary", "object") for each in told)
    message = " or ".join((first, *(other.removeprefix("Input should be ") for other in others)))
    return f"{'.'.join(deepest)[:200] or 'the body'}: {message[:300].rstrip('.')}"


def _find_path(fault: ErrorDetails, value: Any) -> list[str]:
    """The keys and indices that lead to a fault in `value`. pydantic's `loc` has them among names of types."""
    path = []
    for part in fault["loc"]:
        with suppress(KeyError, TypeError):
            value = value[part]
            path.append(str(part))
    return [*path, str(fault["loc"][-1])] if fault["type"] == "missing" else path


def _count(data: bytes, marks: bytes) -> int:
    return sum(data.count(mark) for mark in marks)
