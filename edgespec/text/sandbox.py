"""Renders untrusted Jinja templates. It runs in a helper process, which bounds their time and memory.

Jinja's sandbox keeps templates from Python's internals; the process ends what grows or lasts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from copy import deepcopy
from datetime import datetime
from functools import lru_cache, update_wrapper
from traceback import extract_tb
from typing import Any

from jinja2 import ChainableUndefined, Template, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import SandboxedEnvironment

from edgespec.isolated import answer_questions

_MAX_TEXT = 64 * 2**20  # characters of a prompt
_MAX_REASON = 1000  # characters
_LAZY = ("batch", "map", "reject", "rejectattr", "select", "selectattr", "slice", "unique")  # filters


class GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks text for training; its contents are rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012 (declared this way by Jinja)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Refusal(Exception):
    """The template refuses the conversation."""


class _Undefined(ChainableUndefined):
    """A variable that is not given: empty, even if it is joined to a text, as in llama.cpp's engine."""

    def __add__(self, other: Any) -> Any:
        return other

    __radd__ = __add__


class _Environment(SandboxedEnvironment):
    def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
        raise SecurityError(f"access to attribute {attribute!r} of {type(obj).__name__!r} object is unsafe.")


def main() -> None:
    """Answer each list of (source, variables) with as many outcomes: ("prompt", it), ("refusal", the template's words),
    ("fault", a clause), or ("stopped", a clause) if another try would cost as much.
    """
    answer_questions(lambda _: _render_all)


def _render_all(questions: Sequence[tuple[str, dict[str, Any]]]) -> list[tuple[str, str]]:
    is_shared = len(questions) > 1  # templates may change lists, which other questions have too
    return [_render(source, deepcopy(variables) if is_shared else variables) for source, variables in questions]


def _render(source: str, variables: dict[str, Any]) -> tuple[str, str]:
    try:
        text = _compile(source).render(variables)
    except _Refusal as refusal:
        return "refusal", str(refusal)[:_MAX_REASON]
    except Exception as error:  # noqa: BLE001 - a template can raise any exception
        lines = [getattr(error, "lineno", None)]
        lines += [step.lineno for step in extract_tb(error.__traceback__) if step.filename == "<template>"]
        where = f" (line {lines[-1]})" if lines[-1] is not None else ""
        return "fault", f"fails: {type(error).__name__}: {error}"[:_MAX_REASON] + where
    return ("prompt", text) if len(text) <= _MAX_TEXT else ("stopped", "writes too much text")


@lru_cache(16)
def _compile(source: str) -> Template:
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=_Undefined,
        extensions=["jinja2.ext.loopcontrols", GenerationTag],
    )
    environment.filters |= {name: _listed(environment.filters[name]) for name in _LAZY}
    environment.filters |= {"tojson": _tojson, "safe": str, "from_json": json.loads}
    environment.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    return environment.from_string(source)


def _listed(lazy: Callable[..., Any]) -> Callable[..., Any]:
    """A filter with a list in place of its generator: templates ask for its length, as llama.cpp's engine allows."""
    return update_wrapper(lambda *args, **named: [*lazy(*args, **named)], lazy)


def _refuse(message: str) -> None:
    raise _Refusal(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
