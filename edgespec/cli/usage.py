"""Mistakes on the command line in words."""

from __future__ import annotations

import re

import click

from edgespec.errors import find_near

# click's names of types and ranges in words
_RANGES = (
    (r"is not a valid (?:integer|float)(?: range)?\.", "is not a number."),
    (r"is not in the range (\S+)<=x<=(\S+)\.", r"is not between \1 and \2."),
    (r"is not in the range x>=(\S+)\.", r"is less than \1."),
    (r"is not in the range x<=(\S+)\.", r"is more than \1."),
)


def describe_usage(error: click.ClickException) -> str:
    """The sentence of a click error, with what may have been meant by an unknown option."""
    if isinstance(error, click.NoSuchOption):
        name, known = error.option_name, [] if error.ctx is None else _list_flags(error.ctx)
        begins = (flag for flag in known if flag.startswith(name) and name.startswith("--"))
        near = next(begins, None) or find_near(name, known)
        return f"There is no option {name}.{f' Did you mean {near}?' if near else ''}"
    message = " ".join(error.format_message().split())  # click lists choices on lines of their own
    for pattern, words in _RANGES:
        message = re.sub(pattern, words, message)
    return message


def _list_flags(context: click.Context) -> list[str]:
    return [flag for each in context.command.params for flag in (*each.opts, *each.secondary_opts) if flag[0] == "-"]
