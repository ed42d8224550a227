"""The fields that request bodies share, validated by pydantic. Unknown fields are ignored: clients send many."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    TypeAdapter,
    ValidationError,
)

from edgespec.engine.json_schema import is_shallow
from edgespec.engine.structured_output import Structure, json_structure
from edgespec.errors import InvalidRequest
from edgespec.options import OPTIONS
from edgespec.service.generation_spec import DraftLength, Effort, GenerationSpec, Settings, Thinking, Tool, make_tool
from edgespec.service.response import Part
from edgespec.units import parse_duration

_SAMPLING = {"temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"}
ModelName = Annotated[str, StringConstraints(min_length=1, max_length=512)]
AnyModelName = Annotated[
    str, StringConstraints(max_length=512), BeforeValidator(lambda name: "" if name is None else name)
]
"""Without a name, or with null, the only model of a server answers."""
MAX_STOP = 256  # characters
Stop = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP)]
Stops = Annotated[list[Stop], Field(max_length=16, fail_fast=True)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


def _within_limits(name: str) -> Any:
    """The range of an option, for the fields that share it; those of the interfaces' own documents are narrower."""
    low, high = OPTIONS[name].limits
    return Field(ge=low, le=high)


TopP = Annotated[float, _within_limits("top_p")]
TopK = Annotated[int, _within_limits("top_k")]
MinP = Annotated[float, _within_limits("min_p")]
RepetitionPenalty = Annotated[float, _within_limits("repetition_penalty")]
NO_LIMIT = 2**31
"""Tokens of an answer that may go on to the end of the context."""
Tokens = Annotated[int, Field(ge=-1, le=NO_LIMIT), AfterValidator(lambda n: NO_LIMIT if n == -1 else n)]
"""Tokens of an answer. As in llama.cpp's server, 0 reads the prompt into the cache only, and -1 is no limit."""
FEW, MANY = Field(max_length=256, fail_fast=True), Field(max_length=4096, fail_fast=True)
"""Limits of a list's length. Without `fail_fast` pydantic reports every invalid item of a list of any length."""


class Body(BaseModel):
    """A JSON object of a request."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)


class SamplingBody(Body):
    """Sampling parameters whose names and ranges are the same in OpenAI's and Ollama's interfaces."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**64)] | None = None

    def settings(self, **more: Any) -> Settings:
        """`more`: the settings whose names differ between the interfaces."""
        return Settings(**self.model_dump(include=_SAMPLING), **more)


class Writer:
    """Turns the parts of the answers to one request into the events of an interface, and these into a whole answer.

    `index` numbers the answers; the parts of one come in order.
    """

    last = b""
    """What ends a stream, after its events."""

    def events(self, index: int, part: Part) -> Iterator[dict[str, Any]]:
        """The events of a part."""
        raise NotImplementedError

    def finish(self) -> Iterator[dict[str, Any]]:
        """The events after all answers."""
        yield from ()

    def fail(self, error: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The last events of a stream that fails; `error` is the body that a whole answer would have."""
        yield error

    def response_body(self) -> dict[str, Any]:
        """The whole answer, after the events of all parts."""
        raise NotImplementedError


# Loading and unloading, and how long a model stays loaded: Ollama's `keep_alive`, LM Studio's `ttl`.


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
    """A request that names a model. What the last call has set counts until the model is unloaded."""

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


class GenerationBody(ResidencyBody):
    """The fields of all bodies that ask for `n` answers to each of their prompts, at once or as a stream.

    `draft_max` and `draft_min` are how many tokens are drafted at once; see DraftLength. Their names with a dot are
    those of llama.cpp's server. Where `memory` is false, the memory neither keeps this call's texts nor drafts from
    earlier ones.
    """

    model: AnyModelName = ""
    stream: bool | None = False
    n: Annotated[int, Field(ge=1, le=1)] | None = 1
    draft_max: Count | None = Field(default=None, validation_alias=AliasChoices("draft_max", "speculative.n_max"))
    draft_min: Count | None = Field(default=None, validation_alias=AliasChoices("draft_min", "speculative.n_min"))
    memory: bool | None = None

    def draft_length(self) -> DraftLength:
        return DraftLength(self.draft_max, self.draft_min or 0)

    def writer(self) -> Writer:
        """What writes the answers."""
        raise NotImplementedError

    def generation_spec(self) -> GenerationSpec:
        """What is asked of the engine. Raises InvalidRequest."""
        raise NotImplementedError

    def generation_specs(self) -> list[GenerationSpec]:
        """One for each prompt. Raises InvalidRequest."""
        return [self.generation_spec()]


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


class TextPart(Body):
    type: Literal["text", "input_text", "output_text", "refusal"]
    text: str = ""


class OtherPart(Body):
    type: str


Parts = Annotated[list[TextPart | OtherPart], MANY]


def refuse_fields(body: Body, *names: str) -> None:
    """Raise InvalidRequest for a field that has a value and is not served."""
    for name in names:
        if getattr(body, name):
            raise InvalidRequest(f"{name} is not supported.", hint=f"Remove {name}.")


def join_text(content: str | list[Any] | None) -> str:
    """The text of a message's content. Raises InvalidRequest for a part that is not text."""
    if not isinstance(content, list):
        return content or ""
    for part in content:
        if not hasattr(part, "text"):
            raise InvalidRequest(f"content of type '{part.type}' is not supported.", hint="Send text only.")
    return "".join(part.text for part in content)


# From the bytes of a request to a validated body, within bounds, and beside the event loop where it takes long.


B = TypeVar("B", bound=BaseModel)
T = TypeVar("T")

_MAX_DEPTH = 128
_BOUNDS = ((b",", 2**20, "values"), (b"[{:", 2**17, "arrays, objects and keys"))
"""What there may be of these outside of strings: Python's parser holds the GIL until it has read the last one."""
_LARGE = 2**14  # bytes; what is done with smaller bodies takes less than a change of threads
_CHUNK = 2**16
_THREAD = ThreadPoolExecutor(1, "edgespec-bodies")  # one: several would keep the event loop from the GIL for longer


async def compute(body_bytes: int, function: Callable[[], T]) -> T:
    """The result of `function`, which works on a body of this size: on a thread if that is large."""
    if body_bytes < _LARGE:
        return function()
    return await asyncio.get_running_loop().run_in_executor(_THREAD, function)


def parse_body(data: bytes, kind: type[B]) -> B:
    _check_bounds(data)
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("the body is not valid JSON.", hint="Send a JSON object.") from error
    if not is_shallow(value, _MAX_DEPTH):
        raise InvalidRequest(f"the body is nested more than {_MAX_DEPTH} levels deep.", hint="Simplify it.")
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise InvalidRequest(_describe(error), hint="GET /openapi.json describes the body.") from error


def _check_bounds(data: bytes) -> None:
    if all(_count(data, marks) <= limit for marks, limit, _ in _BOUNDS):  # those in strings included
        return
    counts = [0] * len(_BOUNDS)
    for part in _split_strings_off(data):
        for i, (marks, limit, name) in enumerate(_BOUNDS):
            counts[i] += _count(part, marks)
            if counts[i] > limit:
                raise InvalidRequest(f"the body has more than {limit:,} {name}.", hint="Send less at once.")


def _count(data: bytes, marks: bytes) -> int:
    return sum(data.count(mark) for mark in marks)


def _split_strings_off(data: bytes) -> Iterator[bytes]:
    """What is outside of strings, in parts. Works in steps, so that other threads get the GIL between them."""
    is_inside, rest = False, b""
    for start in range(0, len(data), _CHUNK):
        chunk = rest + data[start : start + _CHUNK]
        is_cut = (len(chunk) - len(chunk.rstrip(b"\\"))) % 2 == 1  # in an escape
        chunk, rest = (chunk[:-1], b"\\") if is_cut else (chunk, b"")
        parts = chunk.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        yield b"".join(parts[is_inside::2])
        is_inside ^= len(parts) % 2 == 0


def _describe(error: ValidationError) -> str:
    """The first fault of a body, without the values in it."""
    first = error.errors(include_input=False, include_url=False, include_context=False)[0]
    where = ".".join(str(part) for part in first["loc"])[:200]
    return f"{where or 'the body'}: {first['msg'][:300].rstrip('.')}."


# The arguments of tool calls for interfaces in which they are objects rather than text.


_OBJECT = TypeAdapter(dict[str, Any])


def read_arguments(text: str) -> dict[str, Any]:
    """The object of a call's arguments.

    Arguments that were cut end with their last complete value, as Anthropic's client reads them. Those that are not
    JSON are the value of INVALID_JSON, in which Anthropic's documentation wraps them.
    """
    if not text:
        return {}
    try:
        return dict(json.loads(text, parse_constant=lambda _: None))  # NaN is not JSON
    except (ValueError, RecursionError):
        pass
    try:
        return _OBJECT.validate_json(text, experimental_allow_partial=True)
    except ValueError:
        return {"INVALID_JSON": text}
