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
    from edgespec.server.remote_model import RemoteModel

_EXAMPLE = 'Write a table for each model, such as [coder] with model = "./coder.gguf", draft = "ngram", ctx = 8192.'
_REMOTE = "openai"
_REMOTE_KEYS = {"backend": str, "url": str, "model": str, "key_env": str, "parallel": int}
_MAX_PARALLEL = 4096
_REMOTE_EXAMPLE = 'A model of another server has backend = "openai", url, model, key_env and parallel.'


@serving_options
@PARALLEL
@click.option("--keep-alive", type=DURATION)
@click.command("model")
def _table(**_options: Any) -> None:
    """The keys of a table, which click checks like command-line options."""


@dataclass(frozen=True, slots=True)
class ModelTable:
    """A model of the file that is loaded here; `keep_alive_s` is None where the command line's counts."""

    config: LoadConfig
    keep_alive_s: float | None


def read_config(path: Path) -> dict[str, ModelTable | RemoteModel]:
    """The models, by the names that clients use: those loaded here, and those of other servers. Raises
    InvalidRequest.
    """
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"cannot read {path}: {reason_of(error)}.", hint=_EXAMPLE) from error
    if not tables:
        raise InvalidRequest(f"{path} names no model.", hint=_EXAMPLE)
    return {name: _parse_table(name, table) for name, table in tables.items()}


def _parse_table(name: str, table: Any) -> ModelTable | RemoteModel:
    if not isinstance(table, dict):
        raise InvalidRequest(f"'{name}' is not a table.", hint=_EXAMPLE)
    if table.get("backend") == _REMOTE:
        return _parse_remote(name, {key.replace("-", "_"): value for key, value in table.items()})
    if "url" in table:
        raise InvalidRequest(f'[{name}]: url needs backend = "{_REMOTE}".', hint=_REMOTE_EXAMPLE)
    arguments = [
        argument for key, value in table.items() if key != "model" for argument in _to_arguments(name, key, value)
    ]
    try:
        options = _table.make_context(name, arguments).params
    except click.UsageError as error:
        hint = _REMOTE_EXAMPLE if "--backend" in error.format_message() else _EXAMPLE
        raise InvalidRequest(f"[{name}]: {error.format_message().rstrip('.')}.", hint=hint) from error
    reference = table.get("model")
    if reference is not None and not isinstance(reference, str):
        raise InvalidRequest(f"[{name}]: model must be a string.", hint=_EXAMPLE)
    return ModelTable(load_config(reference, options), options["keep_alive"])


def _parse_remote(name: str, table: dict[str, Any]) -> RemoteModel:
    """A model of another server, which is asked for as its table's name unless it says otherwise."""
    from edgespec.server.remote_model import MAX_CONCURRENCY, RemoteModel

    if any(word in table for word in ("key", "api_key")):
        message = "a key does not belong into this file."
        raise InvalidRequest(f"[{name}]: {message}", hint="Put it into a variable and name that in key_env.")
    for key, value in table.items():
        if (kind := _REMOTE_KEYS.get(key)) is None:
            message = f"[{name}]: {key} has no meaning for a model of another server."
            raise InvalidRequest(message, hint=f"Remove it. {_REMOTE_EXAMPLE}")
        if not isinstance(value, kind) or isinstance(value, bool):
            what = "a string" if kind is str else "a number"
            raise InvalidRequest(f"[{name}]: {key} must be {what}.", hint=_REMOTE_EXAMPLE)
    if "url" not in table:
        raise InvalidRequest(f"[{name}]: there is no url.", hint=_REMOTE_EXAMPLE)
    if not 1 <= (parallel := table.get("parallel", MAX_CONCURRENCY)) <= _MAX_PARALLEL:
        raise InvalidRequest(f"[{name}]: parallel is not between 1 and {_MAX_PARALLEL}.", hint=_REMOTE_EXAMPLE)
    try:
        return RemoteModel(table["url"], table.get("model", name), table.get("key_env"), parallel)
    except InvalidRequest as error:
        raise InvalidRequest(f"[{name}]: {error.message}", hint=error.hint) from error


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
