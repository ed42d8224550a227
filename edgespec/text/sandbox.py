"""Runs untrusted Jinja templates without access to Python, within limits of time and memory.

Jinja's sandbox blocks access to Python's internals but bounds neither time nor memory. `_Environment` intercepts every
operation that can make a value grow, checks the time, and measures the result, or predicts its size. Loops check the
time in each iteration. Because no value exceeds the size limit, no operation between two checks takes long; threads,
signals and tracers are not needed.
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
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context
from jinja2.visitor import NodeTransformer

from edgespec.errors import EdgespecError, TemplateError

MAX_SOURCE = 64 * 1024  # characters of a template
MAX_TIME_S = 2.0  # of one render
MAX_SIZE = 4 * 1024 * 1024  # of any one value and of all output together, about in characters
_GROWTH = 8  # times the size of the input is added to MAX_SIZE
_UNIT = 64  # counted for each value in addition to its characters; about its bytes
_MAX_INT_BITS = 4096
_VIEWS: tuple[type[Any], ...] = (type({}.keys()), type({}.values()), type({}.items()))
_CONTAINERS: tuple[type[Any], ...] = (dict, list, tuple, set, frozenset, *_VIEWS)


class Meter:
    """Measures the values of one render against the limits. Every method raises TemplateError beyond a limit."""

    def __init__(self) -> None:
        self._deadline_s = time.monotonic() + MAX_TIME_S
        self._max_size = self._output_left = MAX_SIZE
        self._known: dict[int, int] = {}  # id of an input list or dict -> its size

    def admit(self, messages: Sequence[Mapping[str, Any]], values: Mapping[str, Any]) -> None:
        """Raise the size limit in proportion to the input, and keep the input's sizes."""
        self._max_size = 2**62  # no limit for the input itself
        inputs = [*messages, *values.values(), messages]
        self._known = {id(value): self.size_of(value) for value in inputs if isinstance(value, (list, dict))}
        input_size = self.size_of(messages) + self.size_of(list(values.values()))
        self._max_size = self._output_left = MAX_SIZE + _GROWTH * input_size

    def tick(self) -> bool:
        """Check the time. Returns True, for use inside conditions."""
        if time.monotonic() > self._deadline_s:
            raise template_error(f"runs longer than {MAX_TIME_S:g} s")
        return True

    def measure(self, value: Any) -> Any:
        """Check the time and the size of `value`; returns `value`."""
        self.tick()
        self.size_of(value)
        return value

    def size_of(self, value: Any) -> int:
        """About how many characters `value` would print as; stops counting at the limit."""
        total, stack = 0, [value]
        while stack:
            value = stack.pop()
            total += self._known.get(id(value), 0) or _UNIT
            if isinstance(value, str):
                total += len(value)
            elif isinstance(value, int):
                if value.bit_length() > _MAX_INT_BITS:
                    raise template_error("computes with very large numbers")
            elif isinstance(value, _CONTAINERS) and id(value) not in self._known:
                stack += value
                stack += value.values() if isinstance(value, dict) else ()
            if total > self._max_size:
                raise template_error("builds a value that is too large")
        return total

    def check_size(self, size: int) -> None:
        """Check the time and the predicted `size` of a value before it is built."""
        self.tick()
        if size > self._max_size:
            raise template_error("builds a value that is too large")

    def emit(self, value: Any) -> str:
        """The text of `value`, counted as output."""
        text = str(self.measure(value))
        self._output_left -= len(text)
        if self._output_left < 0:
            raise template_error("writes too much text")
        return text


def template_error(problem: str, *, line: int | None = None) -> TemplateError:
    """The error for a template that breaks a limit or fails; `line` is the template's line."""
    where = "" if line is None else f" (line {line})"
    hint = "Use another file of this model or another template."
    return TemplateError(f"the chat template {problem}{where}.", hint=hint)


# Adds guards to a template's syntax tree: checks of the time, and measurements of the values it builds.


class GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks text for training; its contents are rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012 (declared this way by Jinja)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Guards(NodeTransformer):
    """Adds a check of the time to loops, and a measurement to expressions that build values."""

    def _add_measure(self, node: nodes.Expr) -> nodes.Expr:
        self.generic_visit(node)
        if getattr(node, "ctx", "load") != "load":  # the left side of `set a, b = ...`
            return node
        return nodes.Filter(node, "measure", [], [], None, None, lineno=node.lineno)

    visit_Concat = visit_List = visit_Tuple = visit_Dict = _add_measure

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        line = node.lineno
        node.body.insert(0, nodes.ExprStmt(_tick(line), lineno=line))
        if node.test is not None:
            node.test = nodes.And(_tick(line), node.test, lineno=line)
        return node

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Const:
        return nodes.Const(node.data, lineno=node.lineno)  # an expression, so that `finalize` counts it


def _tick(line: int) -> nodes.Call:
    function = nodes.EnvironmentAttribute("tick", lineno=line)
    return nodes.Call(function, [], [], None, None, lineno=line)


_FILE = "<chat template>"

# Format fields that ask for a great width or precision, or take it from an argument.
_WIDE_PERCENT = re.compile(r"%(\([^%]*\))?[-+ #0]*(\*|\d{4,}|\d*\.(\*|\d{4,}))")
_WIDE_BRACES = re.compile(r"\{[^{}]*(\{|:[^{}]*\d{4,})")


def _split_words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_STRING_METHODS = _split_words(
    "capitalize casefold count endswith find index isalnum isalpha isdecimal isdigit islower isnumeric isspace istitle "
    "isupper lower lstrip partition removeprefix removesuffix rfind rindex rpartition rsplit rstrip split splitlines "
    "startswith strip swapcase title upper"
)
_CONTAINER_METHODS = frozenset(["copy", "count", "get", "index", "items", "keys", "values"])
_FILTERS = _split_words(
    "abs capitalize count d default dictsort first float groupby int items last length list lower map max min reject "
    "rejectattr reverse select selectattr sort string title trim truncate unique upper wordcount"
)


class _Namespace(Namespace):
    """A namespace that prints as one word, because its attributes may refer to each other in a cycle."""

    def __repr__(self) -> str:
        return "<namespace>"


class _Environment(ImmutableSandboxedEnvironment):
    """One render: its meter and the guarded operations."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # constants are computed at run time, under guard
            extensions=["jinja2.ext.loopcontrols", GenerationTag],
            finalize=pass_context(lambda _context, value: self.meter.emit(value)),
        )
        self.meter: Meter = Meter()
        self.tick = self.meter.tick  # called by the guarded program
        filters = {name: self.filters[name] for name in _FILTERS}
        self.filters = {name: self._wrap(function) for name, function in filters.items()}
        self.filters |= {"tojson": self._tojson, "join": self._join, "replace": self._replace, "indent": self._indent}
        self.filters |= {"safe": str, "format": self._percent_filter, "measure": self.meter.measure}
        self.globals = {"range": self.globals["range"], "dict": dict}
        self.globals |= {"namespace": _Namespace, "strftime_now": _format_now}

    def _wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)  # keeps Jinja's attribute of filters that take the environment or context
        def measured(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            return self._collect(result) if isinstance(result, Iterator) else self.meter.measure(result)

        return measured

    def _collect(self, values: Iterator[Any]) -> list[Any]:
        """The values of a lazy filter, each measured; together they must not exceed the limit either."""
        items, size = [], 0
        for value in values:
            size += self.meter.size_of(value)
            self.meter.check_size(size)
            items.append(value)
        return items

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        return self.meter.measure(super().call(context, function, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(times, int) and not isinstance(value, (int, float)):
                    size = len(value) if isinstance(value, str) else self.meter.size_of(value)
                    self.meter.check_size(size * times)
        elif operator == "**":
            if not all(isinstance(value, (int, float)) and abs(value) <= 64 for value in (left, right)):
                raise template_error("computes a very large power")
        elif operator == "%" and isinstance(left, str):
            return self._format_percent(left, right)
        return self.meter.measure(super().call_binop(context, operator, left, right))

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
            "join": self._join_method,
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
        text = str(text)  # a filter also receives numbers
        found = text.count(old)
        self.meter.check_size(len(text) + found * len(new))
        return text.replace(old, new, -1 if count is None else count)

    def _join_method(self, separator: str, values: Iterable[Any]) -> str:
        return self._join(values, separator)

    def _join(self, values: Iterable[Any], separator: str = "", attribute: str | int | None = None) -> str:
        items = list(values)
        if attribute is not None:
            items = [self.getitem(item, attribute) for item in items]
        self.meter.check_size(self.meter.size_of(items) + len(items) * len(separator))
        return separator.join(str(item) for item in items)

    def _indent(self, text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
        margin = width if isinstance(width, str) else " " * min(width, 1000)
        self.meter.check_size(len(text) + (text.count("\n") + 1) * len(margin))
        head, *rest = text.split("\n")
        lines = [margin + line if line or blank else line for line in rest]
        return "\n".join([margin + head if first else head, *lines])

    def _format_percent(self, text: str, values: Any) -> str:
        if _WIDE_PERCENT.search(text):
            raise template_error("formats text with a very large width")
        self.meter.check_size(self.meter.size_of(text) + text.count("%") * self.meter.size_of(values))
        return str(str(text) % values)

    def _percent_filter(self, text: str, *values: Any, **named: Any) -> str:
        return self._format_percent(text, named or values)

    def _format(self, text: str, *values: Any, **named: Any) -> str:
        if _WIDE_BRACES.search(text.replace("{{", "")):
            raise template_error("formats text with a very large width")
        self.meter.check_size(
            self.meter.size_of(text) + text.count("{") * self.meter.size_of([*values, *named.values()])
        )
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
            self.meter.check_size(size)
        return "".join(parts)


def _format_now(pattern: str) -> str:
    return datetime.now().strftime(pattern[:200])


def compile_source(source: str) -> CodeType:
    """Compile a template with its guards. Raises TemplateError for a malformed or long `source`."""
    if len(source) > MAX_SOURCE:
        raise template_error(f"is {len(source):,} characters long; {MAX_SOURCE:,} are allowed")
    environment = _Environment()
    try:
        tree = Guards().visit(environment.parse(source))
        return environment.compile(tree, filename=_FILE)
    except jinja2.TemplateSyntaxError as error:
        raise template_error(f"is malformed: {error.message}", line=error.lineno) from error
    except (RecursionError, MemoryError, SyntaxError) as error:  # from Python's compiler
        raise template_error("is nested too deeply") from error


def run(
    code: CodeType,
    messages: list[dict[str, Any]],
    values: Mapping[str, Any],
    reject: Callable[[str], None],
) -> str:
    """Render a compiled template; `reject` is the template's `raise_exception`.

    Raises what `reject` raises, and TemplateError for every failure of the template itself.
    """
    environment = _Environment()
    environment.globals["raise_exception"] = reject
    try:
        environment.meter.admit(messages, values)
        template = environment.template_class.from_code(environment, code, environment.globals)
        return template.render({**values, "messages": messages})
    except EdgespecError:
        raise
    except RecursionError as error:
        raise template_error("calls itself without end") from error
    except Exception as error:  # a template can raise any exception
        raise template_error(f"fails: {type(error).__name__}: {error}", line=_find_line(error)) from error


def _find_line(error: BaseException) -> int | None:
    """The template's line that raised `error`."""
    line, step = None, error.__traceback__
    while step is not None:
        if step.tb_frame.f_code.co_filename == _FILE:
            line = step.tb_lineno
        step = step.tb_next
    return line
