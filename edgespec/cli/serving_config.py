"""The file that says which models a server has, and how each is opened."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.options import PARALLEL, open_request, serving_options
from edgespec.errors import InvalidRequest, reason_of

if TYPE_CHECKING:
    from edgespec.planner.plan import LoadConfig

_FORM = 'Write a table for each model, such as [coder] with model = "./coder.gguf", draft = "ngram", ctx = 8192.'


@serving_options
@PARALLEL
@click.command("model")
def _options(**_given: Any) -> None:
    """What a table may say; click checks it as it checks the command line."""


def configured(path: Path) -> dict[str, LoadConfig]:
    """What to open by the names that clients use. Raises InvalidRequest."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"cannot read {path}: {reason_of(error)}.", hint=_FORM) from error
    if not tables:
        raise InvalidRequest(f"{path} names no model.", hint=_FORM)
    return {name: _request(name, table) for name, table in tables.items()}


def _request(name: str, table: Any) -> LoadConfig:
    if not isinstance(table, dict):
        raise InvalidRequest(f"'{name}' is no table.", hint=_FORM)
    arguments = [
        argument for key, value in table.items() if key != "model" for argument in _arguments(name, key, value)
    ]
    try:
        given = _options.make_context(name, arguments).params
    except click.UsageError as error:
        raise InvalidRequest(f"[{name}]: {error.format_message().rstrip('.')}.", hint=_FORM) from error
    reference = table.get("model")
    if reference is not None and not isinstance(reference, str):
        raise InvalidRequest(f"[{name}]: model is a text.", hint=_FORM)
    return open_request(reference, given)


def _arguments(name: str, key: str, value: Any) -> list[str]:
    """A setting as the command line has it."""
    found = {option.name: option for option in _options.params if isinstance(option, click.Option)}
    option = found.get(key.replace("-", "_"))
    if option is None:
        known = ", ".join(sorted(str(each) for each in found))
        raise InvalidRequest(f"[{name}]: there is no setting '{key}'.", hint=f"There are: model, {known}.")
    if not isinstance(value, str | int | float):
        raise InvalidRequest(f"[{name}]: {key} is a text, a number, true or false.", hint=_FORM)
    if not option.is_flag:
        return [option.opts[0], str(value)]
    if not isinstance(value, bool):
        raise InvalidRequest(f"[{name}]: {key} is true or false.", hint=_FORM)
    return [option.opts[0]] if value else option.secondary_opts[:1]
