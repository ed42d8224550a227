"""Renders untrusted Jinja templates. It runs in a helper process, which bounds their time and memory.

Jinja's sandbox keeps templates from Python's internals; the process ends what grows or lasts.
"""

from __future__ import annotations

import json
from datetime import datetime
from functools import lru_cache
from traceback import extract_tb
from typing import Any

from jinja2 import Template, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from edgespec.isolated import answer_questions

_MAX_TEXT = 64 * 2**20  # characters of a prompt
_MAX_REASON = 1000  # characters


class GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks text for training; its contents are rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012 (declared this way by Jinja)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Refusal(Exception):
    """The template refuses the conversation."""


def main() -> None:
    """Answer each (source, variables) with ("prompt", it), ("refusal", the template's words) or ("fault", a clause)."""
    answer_questions(lambda _: _render)


def _render(question: tuple[str, dict[str, Any]]) -> tuple[str, str]:
    source, variables = question
    try:
        text = _compile(source).render(variables)
    except _Refusal as refusal:
        return "refusal", str(refusal)[:_MAX_REASON]
    except Exception as error:  # noqa: BLE001 - a template can raise any exception
        lines = [getattr(error, "lineno", None)]
        lines += [step.lineno for step in extract_tb(error.__traceback__) if step.filename == "<template>"]
        where = f" (line {lines[-1]})" if lines[-1] is not None else ""
        return "fault", f"fails: {type(error).__name__}: {error}"[:_MAX_REASON] + where
    return ("prompt", text) if len(text) <= _MAX_TEXT else ("fault", "writes too much text")


@lru_cache(16)
def _compile(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationTag]
    )
    environment.filters |= {"tojson": _tojson, "safe": str}
    environment.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    return environment.from_string(source)


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
