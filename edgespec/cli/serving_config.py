"""The configuration file of `edgespec serve`: which models a server has, and how each is loaded."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.options import DURATION, PARALLEL, OptionWithSynonym, load_config, serving_options
from edgespec.errors import InvalidRequest, reason_of

if TYPE_CHECKING:
    from edgespec.planner.plan import LoadConfig

_EXAMPLE = 'Write a table for each model, such as [coder] with model = "./coder.gguf", draft = "ngram", ctx = 8192.'


@serving_options
@PARALLEL
@click.option("--keep-alive", type=DURATION)
@click.command("model")
def _table(**_options: Any) -> None:
    """The keys of a table, which click checks like command-line options."""


@dataclass(frozen=True, slots=True)
class ModelTable:
    """A model of the file; `keep_alive_s` is None where the command line's counts."""

    config: LoadConfig
    keep_alive_s: float | None


def read_config(path: Path) -> dict[str, ModelTable]:
    """The models, by the names that clients use. Raises InvalidRequest."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"cannot read {path}: {reason_of(error)}.", hint=_EXAMPLE) from error
    if not tables:
        raise InvalidRequest(f"{path} names no model.", hint=_EXAMPLE)
    return {name: _parse_table(name, table) for name, table in tables.items()}


def _parse_table(name: str, table: Any) -> ModelTable:
    if not isinstance(table, dict):
        raise InvalidRequest(f"'{name}' is not a table.", hint=_EXAMPLE)
    arguments = [
        argument for key, value in table.items() if key != "model" for argument in _to_arguments(name, key, value)
    ]
    try:
        options = _table.make_context(name, arguments).params
    except click.UsageError as error:
        raise InvalidRequest(f"[{name}]: {error.format_message().rstrip('.')}.", hint=_EXAMPLE) from error
    reference = table.get("model")
    if reference is not None and not isinstance(reference, str):
        raise InvalidRequest(f"[{name}]: model must be a string.", hint=_EXAMPLE)
    return ModelTable(load_config(reference, options), options["keep_alive"])


def _to_arguments(name: str, key: str, value: Any) -> list[str]:
    """A key and its value as command-line arguments."""
    options = {option.name: option for option in _table.params if isinstance(option, click.Option)}
    renamed = [option for option in options.values() if isinstance(option, OptionWithSynonym)]
    by_key = {option.synonym.removeprefix("--"): option for option in renamed} | options
    option = by_key.get(key.replace("-", "_"))
    if option is None:
        known = ", ".join(sorted(str(each) for each in options))
        raise InvalidRequest(f"[{name}]: there is no key '{key}'.", hint=f"Keys are model, {known}.")
    if not isinstance(value, str | int | float):
        raise InvalidRequest(f"[{name}]: {key} must be a string, a number, true or false.", hint=_EXAMPLE)
    if not option.is_flag:
        return [option.opts[0], str(value)]
    if not isinstance(value, bool):
        raise InvalidRequest(f"[{name}]: {key} must be true or false.", hint=_EXAMPLE)
    return [option.opts[0]] if value else option.secondary_opts[:1]
