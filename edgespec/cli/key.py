"""`edgespec key`: the API keys of a server."""

from __future__ import annotations

import json
from pathlib import Path

import click

from edgespec.cli.options import json_option
from edgespec.cli.output import format_table

_FILE_NAME = "keys.toml"


def _default_path() -> Path:
    from edgespec.models.registry import config_dir

    return config_dir() / _FILE_NAME


_file_option = click.option(
    "--file",
    "path",
    type=click.Path(path_type=Path),
    metavar="FILE",
    default=_default_path,
    show_default=False,
    help=f"File of the keys.  [default: {_FILE_NAME} in the configuration folder]",
)


@click.group("key")
def key_command() -> None:
    """API keys for `edgespec serve --keys FILE`. The file holds names and hashes; a key is shown once, when made."""


@key_command.command("add")
@click.argument("name")
@click.option("--manage", is_flag=True, help="The key may also load and unload models.")
@click.option(
    "--memory", is_flag=True, help="Keep the key's texts on the server, and draft from them for this key alone."
)
@_file_option
def add_command(name: str, manage: bool, memory: bool, path: Path) -> None:
    """Make a key for a client called NAME and print it. The log and the metrics of the server show NAME.

    A running server reads the file again when it changes.
    """
    from edgespec.server.auth import add_key

    key = add_key(path, name, may_manage=manage, remembers=memory)
    click.echo(f"The key of {name}, which is stored nowhere else:", err=True)
    click.echo(key)
    click.echo(f"Its hash is in {path}: edgespec serve --keys {path}", err=True)
    _forget(name)  # of a key of this name whose entry was removed by hand


@key_command.command("list")
@_file_option
@json_option
def list_command(path: Path, as_json: bool) -> None:
    """List the names of the keys, and what they may do."""
    from edgespec.server.auth import read_keys

    callers = [*read_keys(path).values()] if path.exists() else []
    if as_json:
        shown = [{"name": each.name, "manages": each.may_manage, "remembers": each.remembers} for each in callers]
        click.echo(json.dumps(shown, ensure_ascii=False))
        return
    if not callers:
        chosen = "" if path == _default_path() else f" --file {path}"
        click.echo(f"There are no keys in {path}; `edgespec key add NAME{chosen}` makes one.")
        return
    rows = [
        (
            each.name,
            "generate and manage models" if each.may_manage else "generate",
            "kept for drafts" if each.remembers else "not kept",
        )
        for each in callers
    ]
    click.echo("\n".join(format_table([("NAME", "MAY", "TEXTS"), *rows])))


@key_command.command("rm")
@click.argument("name")
@_file_option
def rm_command(name: str, path: Path) -> None:
    """Remove the key called NAME, and its texts. A running server refuses it from then on."""
    from edgespec.server.auth import remove_key

    remove_key(path, name)
    click.echo(f"removed {name} from {path}")
    if n := _forget(name):
        click.echo(f"removed its texts, {n:,} tokens, from the memory")


def _forget(name: str) -> int:
    """Remove what the memory has of a key; returns the number of tokens."""
    from edgespec.cli.memory import open_store
    from edgespec.folders import memory_folder
    from edgespec.server.record import name_namespace

    if not memory_folder().is_dir():
        return 0
    with open_store() as store:
        return store.clear(name_namespace(name))
