"""The fields that request bodies share, validated by pydantic. Unknown fields are ignored: clients send many."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
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
from edgespec.service.generation_spec import Settings, Tool, make_tool

ModelName = Annotated[str, StringConstraints(min_length=1, max_length=512)]
AnyModelName = Annotated[
    str, StringConstraints(max_length=512), BeforeValidator(lambda name: "" if name is None else name)
]
"""Without a name, or with null, the only model of a server answers."""
_MAX_STOP = 256  # characters
Stop = Annotated[str, StringConstraints(min_length=1, max_length=_MAX_STOP)]
Stops = Annotated[list[Stop], Field(max_length=16, fail_fast=True)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
TokenId = Annotated[str, StringConstraints(pattern=r"^\d{1,9}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
NO_LIMIT = 2**31
"""Tokens of an answer that may go on to the end of the context."""
Tokens = Annotated[int, Field(ge=-1, le=NO_LIMIT), AfterValidator(lambda n: NO_LIMIT if n == -1 else n)]
"""Tokens of an answer. As in llama.cpp's server, 0 reads the prompt into the cache only, and -1 is no limit."""
FEW, MANY = Field(max_length=256, fail_fast=True), Field(max_length=4096, fail_fast=True)
"""Limits of a list's length. Without `fail_fast` pydantic reports every invalid item of a list of any length."""
_MAX_BIASES = 4096


def _limit_length(value: object) -> object:
    """Reject a large mapping before each of its items is validated."""
    if isinstance(value, dict) and len(value) > _MAX_BIASES:
        raise ValueError(f"there are more than {_MAX_BIASES:,}")
    return value


class Body(BaseModel):
    """A JSON object of a request."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)


class StreamOptions(Body):
    include_usage: bool = False


class SamplingBody(Body):
    """Sampling parameters whose names and ranges are the same in OpenAI's and Ollama's interfaces."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None


class CompletionBody(SamplingBody):
    """The fields that /v1/chat/completions and /v1/completions share. `top_k`, `min_p` and `repetition_penalty` are
    extensions, named as in llama.cpp's server.
    """

    model: AnyModelName = ""
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: Annotated[dict[TokenId, Bias] | None, BeforeValidator(_limit_length)] = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**64)] | None = None
    stop: str | Stops | None = None
    n: Annotated[int, Field(ge=1, le=16)] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None

    def settings(self) -> Settings:
        bias = None if self.logit_bias is None else tuple((int(token), by) for token, by in self.logit_bias.items())
        return Settings(
            self.temperature,
            self.top_p,
            self.top_k,
            self.min_p,
            self.presence_penalty,
            self.frequency_penalty,
            self.repetition_penalty,
            bias,
        )

    def stops(self) -> tuple[str, ...]:
        """Raises InvalidRequest."""
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if not all(0 < len(text) <= _MAX_STOP for text in stops):
            raise InvalidRequest(
                f"a stop string must have 1 to {_MAX_STOP} characters.", hint="Shorten it, or remove an empty one."
            )
        return stops

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


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
        """Raises InvalidRequest."""
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
        """Raises InvalidRequest."""
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
    """Raises InvalidRequest."""
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
        raise InvalidRequest(_describe(error), hint="Correct the body.") from error


def _check_bounds(data: bytes) -> None:
    """Raises InvalidRequest."""
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
