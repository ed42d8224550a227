"""Runs untrusted Jinja templates: no access to Python, no endless loop, no value that fills the memory.

Jinja's sandbox closes the way to Python's internals but bounds neither time nor memory. Here every operation that
can make a value grow passes `_Environment`, which measures what it made, or what it would make, against one size
limit and looks at the clock. Loops do so at each turn. Since no value exceeds the limit, no single operation between
two looks at the clock takes long, and nothing depends on threads, signals or tracers.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial, wraps
from types import CodeType
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context

from edgespec.errors import EdgespecError, TemplateError
from edgespec.text.limits import Limits
from edgespec.text.sandbox_ast import GenerationTag, Guards

_FILE = "<chat template>"
_UNIT = 64  # what a list element or any value counts beside its characters; about its bytes
_INT_BITS = 4096
_CONTAINERS: tuple[type[Any], ...] = (
    dict,
    list,
    tuple,
    set,
    frozenset,
    type({}.keys()),
    type({}.values()),
    type({}.items()),
)

# Format fields that ask for a great width or precision, or take it from an argument.
_WIDE_PERCENT = re.compile(r"%(\([^%]*\))?[-+ #0]*(\*|\d{4,}|\d*\.(\*|\d{4,}))")
_WIDE_BRACES = re.compile(r"\{[^{}]*(\{|:[^{}]*\d{4,})")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_STRING_METHODS = _words(
    "capitalize casefold count endswith find index isalnum isalpha isdecimal isdigit islower isnumeric isspace istitle "
    "isupper lower lstrip partition removeprefix removesuffix rfind rindex rpartition rsplit rstrip split splitlines "
    "startswith strip swapcase title upper"
)
_CONTAINER_METHODS = frozenset(["copy", "count", "get", "index", "items", "keys", "values"])
_FILTERS = _words(
    "abs capitalize count d default dictsort first float groupby int items last length list lower map max min reject "
    "rejectattr reverse select selectattr sort string title trim truncate unique upper wordcount"
)


class _Namespace(Namespace):
    """A namespace that prints as one word: its attributes may refer to each other without end."""

    def __repr__(self) -> str:
        return "<namespace>"


class _Environment(ImmutableSandboxedEnvironment):
    """One render: its deadline, the size it may reach, and the guarded operations."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, limits: Limits) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # constants are computed under guard too, not while compiling
            extensions=["jinja2.ext.loopcontrols", GenerationTag],
            finalize=pass_context(lambda _context, value: self._emit(value)),
        )
        self._limits = limits
        self._deadline_s = time.monotonic() + limits.time_s
        self._room = self._left = limits.size
        self._known: dict[int, int] = {}  # id of an input list or dict -> its size
        filters = {name: self.filters[name] for name in _FILTERS}
        self.filters = {name: self._measuring(function) for name, function in filters.items()}
        self.filters |= {"tojson": self._tojson, "join": self._join, "replace": self._replace, "indent": self._indent}
        self.filters |= {"safe": str, "format": self._percent_filter, "measured": self.measured}
        self.globals = {"range": self.globals["range"], "dict": dict, "namespace": _Namespace, "strftime_now": _now}

    def admit(self, messages: Sequence[Mapping[str, Any]], values: Mapping[str, Any]) -> None:
        """Raises the size limit in proportion to the input, and remembers the input's sizes."""
        self._room = 2**62  # the input itself has no limit here
        inputs = [*messages, *values.values(), messages]
        self._known = {id(value): self._size(value) for value in inputs if isinstance(value, (list, dict))}
        self._room = self._left = self._limits.size + self._limits.growth * (
            self._size(messages) + self._size(list(values.values()))
        )

    def tick(self) -> bool:
        """True, for use inside conditions; raises TemplateError after the deadline."""
        if time.monotonic() > self._deadline_s:
            raise _refused(f"runs longer than {self._limits.time_s:g} s")
        return True

    def measured(self, value: Any) -> Any:
        """`value`, if it is within the limits."""
        self.tick()
        self._size(value)
        return value

    def _size(self, value: Any) -> int:
        """About how many characters `value` would print as; stops counting at the limit."""
        total, stack = 0, [value]
        while stack:
            value = stack.pop()
            total += self._known.get(id(value), 0) or _UNIT
            if isinstance(value, str):
                total += len(value)
            elif isinstance(value, int):
                if value.bit_length() > _INT_BITS:
                    raise _refused("computes with very large numbers")
            elif isinstance(value, _CONTAINERS) and id(value) not in self._known:
                stack += value
                stack += value.values() if isinstance(value, dict) else ()
            if total > self._room:
                raise _refused("builds a value that is too large")
        return total

    def _predict(self, size: int) -> None:
        self.tick()
        if size > self._room:
            raise _refused("builds a value that is too large")

    def _emit(self, value: Any) -> str:
        text = str(self.measured(value))
        self._left -= len(text)
        if self._left < 0:
            raise _refused("writes too much text")
        return text

    def _measuring(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)  # keeps Jinja's mark for filters that want the environment or context
        def measured(*args: Any, **kwargs: Any) -> Any:
            made = function(*args, **kwargs)
            return self._collected(made) if isinstance(made, Iterator) else self.measured(made)

        return measured

    def _collected(self, values: Iterator[Any]) -> list[Any]:
        """What a lazy filter yields, measured one by one: together the values may exceed the limit."""
        items, size = [], 0
        for value in values:
            size += self._size(value)
            self._predict(size)
            items.append(value)
        return items

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        return self.measured(super().call(context, function, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(times, int) and not isinstance(value, (int, float)):
                    self._predict((len(value) if isinstance(value, str) else self._size(value)) * times)
        elif operator == "**":
            if not all(isinstance(value, (int, float)) and abs(value) <= 64 for value in (left, right)):
                raise _refused("computes a very large power")
        elif operator == "%" and isinstance(left, str):
            return self._percent(left, right)
        return self.measured(super().call_binop(context, operator, left, right))

    def getattr(self, obj: Any, attribute: str) -> Any:
        return self._string_method(obj, attribute) if isinstance(obj, str) else super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(obj, str) and isinstance(argument, str):
            return self._string_method(obj, argument)
        return super().getitem(obj, argument)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, (int, float, bytes)):
            return False
        if isinstance(obj, (dict, list, tuple)):
            return attr in _CONTAINER_METHODS
        return super().is_safe_attribute(obj, attr, value)

    def _string_method(self, text: str, name: str) -> Any:
        guarded: dict[str, Callable[..., str]] = {
            "replace": self._replace,
            "join": self._joined_by,
            "format": self._format,
        }
        if name in guarded:
            return partial(guarded[name], text)
        if name in _STRING_METHODS:
            return getattr(text, name)
        if hasattr(text, name):
            return self.unsafe_undefined(text, name)
        return self.undefined(obj=text, name=name)

    def _replace(self, text: str, old: str, new: str, count: int | None = None) -> str:
        text = str(text)  # a filter is also given numbers
        found = text.count(old)
        self._predict(len(text) + found * len(new))
        return text.replace(old, new, -1 if count is None else count)

    def _joined_by(self, separator: str, values: Iterable[Any]) -> str:
        return self._join(values, separator)

    def _join(self, values: Iterable[Any], separator: str = "", attribute: str | int | None = None) -> str:
        items = list(values)
        if attribute is not None:
            items = [self.getitem(item, attribute) for item in items]
        self._predict(self._size(items) + len(items) * len(separator))
        return separator.join(str(item) for item in items)

    def _indent(self, text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
        margin = width if isinstance(width, str) else " " * min(width, 1000)
        self._predict(len(text) + (text.count("\n") + 1) * len(margin))
        head, *rest = text.split("\n")
        lines = [margin + line if line or blank else line for line in rest]
        return "\n".join([margin + head if first else head, *lines])

    def _percent(self, text: str, values: Any) -> str:
        if _WIDE_PERCENT.search(text):
            raise _refused("formats text with a very large width")
        self._predict(self._size(text) + text.count("%") * self._size(values))
        return str(str(text) % values)

    def _percent_filter(self, text: str, *values: Any, **named: Any) -> str:
        return self._percent(text, named or values)

    def _format(self, text: str, *values: Any, **named: Any) -> str:
        if _WIDE_BRACES.search(text.replace("{{", "")):
            raise _refused("formats text with a very large width")
        self._predict(self._size(text) + text.count("{") * self._size([*values, *named.values()]))
        formatter: Callable[..., str] = super().getattr(text, "format")
        return formatter(*values, **named)

    def _tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        encoder = json.JSONEncoder(
            ensure_ascii=ensure_ascii,
            indent=None if indent is None else min(indent, 16),
            separators=separators,
            sort_keys=sort_keys,
        )
        parts, size = [], 0
        for part in encoder.iterencode(value):
            parts.append(part)
            size += len(part)
            self._predict(size)
        return "".join(parts)


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern[:200])


def _refused(what: str, *, line: int | None = None) -> TemplateError:
    where = "" if line is None else f" (line {line})"
    return TemplateError(f"the chat template {what}{where}", hint="use another file of this model or another template")


def compile_source(source: str) -> CodeType:
    """The guarded program of a template; raises TemplateError, with the line, if `source` is malformed."""
    environment = _Environment(Limits())
    try:
        tree = Guards().visit(environment.parse(source))
        return environment.compile(tree, filename=_FILE)
    except jinja2.TemplateSyntaxError as error:
        raise _refused(f"is malformed: {error.message}", line=error.lineno) from error
    except (RecursionError, MemoryError, SyntaxError) as error:  # from Python's own compiler
        raise _refused("is nested too deeply") from error


def run(
    code: CodeType,
    messages: list[dict[str, Any]],
    values: Mapping[str, Any],
    limits: Limits,
    reject: Callable[[str], None],
) -> str:
    """Renders a compiled template; `reject` is the template's `raise_exception`.

    Raises what `reject` raises, and TemplateError for every failure of the template itself.
    """
    environment = _Environment(limits)
    environment.globals["raise_exception"] = reject
    try:
        environment.admit(messages, values)
        template = environment.template_class.from_code(environment, code, environment.globals)
        return template.render({**values, "messages": messages})
    except EdgespecError:
        raise
    except RecursionError as error:
        raise _refused("calls itself without end") from error
    except Exception as error:  # a template may fail in any way a program may
        raise _refused(f"fails: {type(error).__name__}: {error}", line=_line(error)) from error


def _line(error: BaseException) -> int | None:
    """The template's line at which `error` was raised."""
    line, step = None, error.__traceback__
    while step is not None:
        if step.tb_frame.f_code.co_filename == _FILE:
            line = step.tb_lineno
        step = step.tb_next
    return line
