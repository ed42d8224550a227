"""The configuration file of `edgespec serve`: which models a server has, and how each is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.options import load_config, offer, read_duration, serving_options
from edgespec.cli.usage import describe_usage
from edgespec.errors import InvalidRequest, reason_of
from edgespec.files import parse_toml
from edgespec.options import PARALLEL

if TYPE_CHECKING:
    from edgespec.server.models import LocalModel
    from edgespec.server.remote_client import RemoteModel


_REMOTE = "openai"
_EXAMPLE = (
    'Write a table for each model, such as [coder] with model = "./coder.gguf", draft = "ngram", ctx = 8192. One of '
    f'another server has backend = "{_REMOTE}", url, model, key_env and parallel.'
)


@serving_options
@offer(PARALLEL)
@click.option("--keep-alive", type=read_duration)
@click.option("--model")
@click.command("model", add_help_option=False)
def _local(**_options: Any) -> None:
    """The keys of a model that is loaded here, whose values click checks like those of command-line options."""


def read_config(path: Path) -> dict[str, LocalModel | RemoteModel]:
    """The models, by the names that clients use: those loaded here, and those of other servers. Raises
    InvalidRequest.
    """
    try:
        tables = parse_toml(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"cannot read {path}: {reason_of(error)}.", hint=_EXAMPLE) from error
    if not tables:
        raise InvalidRequest(f"'{path}' names no model.", hint=_EXAMPLE)
    return {name: _parse_table(name, table) for name, table in tables.items()}


def _parse_table(name: str, table: Any) -> LocalModel | RemoteModel:
    from edgespec.server.models import LocalModel
    from edgespec.server.remote_client import read_model

    if not isinstance(table, dict):
        raise InvalidRequest(f"'{name}' is not a table.", hint=_EXAMPLE)
    if table.get("backend") == _REMOTE:
        return read_model(name, table, _EXAMPLE)
    options = _read_values(name, table)
    return LocalModel(load_config(options["model"], options), options["keep_alive"])


def _read_values(name: str, table: dict[str, Any]) -> dict[str, Any]:
    """The values of the table of a model that is loaded here, read as options of the command line."""
    switches = {each for option in _local.params for each in option.secondary_opts}
    words: list[str] = []
    for key, value in table.items():
        option = key.replace("_", "-")
        if isinstance(value, bool):
            words += [f"--{option}"] if value else switches & {f"--no-{option}"}
        else:
            words.append(f"--{option}={value}")
    try:
        return _local.make_context(name, words).params
    except click.UsageError as error:
        raise InvalidRequest(f"[{name}]: {describe_usage(error).rstrip('.')}.", hint=_EXAMPLE) from error
