"""From the bytes of a request to a validated body, within bounds, and beside the event loop where it takes long."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from edgespec.engine.structured_output import is_shallow
from edgespec.errors import InvalidRequest

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
