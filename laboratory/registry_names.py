"""Ask the hub for every model that models.toml names: repositories and files are renamed and withdrawn.

    uv run python -m laboratory.registry_names

Prints a line for each that the hub does not have, with the table that names it, and exits with 1 if there is one. A hub
that does not answer is no missing model: then the program stops with 2. Nothing is downloaded.
"""

from __future__ import annotations

import sys
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import click

from edgespec.errors import HubError
from edgespec.models.hub import Hub
from edgespec.models.hub_errors import HubUnreachable
from edgespec.models.references import HubFile, HubQuant, HubReference, HubRepo, parse_reference
from edgespec.models.registry import NO_DRAFT, ROLES

SHIPPED = Path(__file__).parents[1] / "models.toml"
_MODELS = (*ROLES, "with_head")  # keys of a pair


def list_names(file: Path) -> Iterator[tuple[str, str, HubReference]]:
    """(table, the kind of files that it needs, reference) of all models on the hub that a models.toml names."""
    for alias, table in tomllib.loads(file.read_text(encoding="utf-8")).items():
        for kind in ("gguf", "mlx"):
            pair = table.get(kind, {})
            for role in _MODELS:
                if (text := pair.get(role, NO_DRAFT)) != NO_DRAFT:
                    reference = parse_reference(text)
                    if isinstance(reference, HubFile | HubQuant | HubRepo):
                        yield f"[{alias}.{kind}] {role}", kind, reference


def find_problem(hub: Hub, kind: str, reference: HubReference) -> str | None:
    """What is wrong with a name; None if the hub has the model. Raises HubUnreachable."""
    try:
        found = hub.resolve(reference)
    except HubUnreachable:
        raise
    except HubError as error:
        return error.message
    return None if found.kind == kind else f"{reference.repo} has no files for {kind}."


@click.command()
@click.argument("file", default=SHIPPED, type=click.Path(exists=True, dir_okay=False, path_type=Path))
def main(file: Path) -> None:
    """Look for the models that FILE names, by default those of models.toml here."""
    count, known = 0, dict[tuple[str, HubReference], str | None]()
    with tempfile.TemporaryDirectory() as empty:  # a cached copy does not count
        hub = replace(Hub.from_environment(), cache_dir=Path(empty), offline=False)
        for table, kind, reference in list_names(file):
            try:
                if (kind, reference) not in known:
                    known[kind, reference] = find_problem(hub, kind, reference)
            except HubUnreachable as error:
                click.echo(f"{table} = {reference}: {error.message}", err=True)
                sys.exit(2)
            if problem := known[kind, reference]:
                count += 1
                click.echo(f"{table} = {reference}: {problem}")
    click.echo(f"{len(known)} models asked for, {count} names without one", err=True)
    sys.exit(1 if count else 0)


if __name__ == "__main__":
    main()
