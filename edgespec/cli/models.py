"""`edgespec pull`, `list`, `rm`: download, list and remove models."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.completers import complete_download, complete_model
from edgespec.cli.options import backend_option, draft_option, parse_backend
from edgespec.units import gib

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from edgespec.backends import FileBackend
    from edgespec.backends.devices import Memory
    from edgespec.hub.cache import CachedModel
    from edgespec.planner.catalogue import Entry as CatalogueEntry
    from edgespec.registry.schema import Registry


_backend_option = backend_option("Runtime whose model an alias stands for.")


@click.command("pull")
@click.argument("model", metavar="REF", shell_complete=complete_model)
@draft_option("As for run; the models of these drafters are downloaded too.")
@click.option(
    "--ctx", type=click.IntRange(8), help="Context size for the memory check. [default: the model's, at most 8192]"
)
@_backend_option
@click.option("--force", is_flag=True, help="Download even if memory looks insufficient.")
@click.option("--verify", is_flag=True, help="Read the downloaded files in full and compare their hashes.")
def pull_command(model: str, draft: str, ctx: int | None, backend: str, force: bool, verify: bool) -> None:
    """Download a model with its draft model and trained head, or resume a download.

    Reads the headers first: the tokenizers must match and memory must suffice.
    """
    from edgespec.backends.options import LoadOptions
    from edgespec.cli.terminal import TerminalReporter
    from edgespec.hub.hub import Hub
    from edgespec.planner.plan import LoadConfig, fetch, plan
    from edgespec.planner.report import describe_faster
    from edgespec.registry.resolve import HubGguf, HubMlx
    from edgespec.registry.schema import load_registry

    hub, reporter = Hub.from_environment(), TerminalReporter()
    options = LoadOptions(context_size=ctx)
    request = LoadConfig(model, parse_backend(backend), draft, load=options, force=force, fetch_heads=True)
    planned = plan(request, load_registry(), hub, reporter)
    if told := describe_faster(planned.metadata, measure=False):
        reporter.notice(f"{told}.")
    for source in planned.sources:
        if verify and isinstance(source, HubGguf | HubMlx):
            hub.verify(source.model, lambda name: click.echo(f"checking {name}", err=True))
        click.echo(str(fetch(source, hub, reporter)))


@click.command("list")
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout.")
def list_command(as_json: bool) -> None:
    """List aliases, downloaded models, and GGUF files of LM Studio, Ollama and llama.cpp.

    Sizes with ~ are estimates for what is not downloaded. FIT compares with the RAM that is free now; `edgespec
    recommend` counts accelerators too. `--model PATH` loads a file of another program in place.
    """
    from edgespec.backends import prefers_mlx
    from edgespec.backends.devices import host_memory
    from edgespec.hub.hub import Hub
    from edgespec.planner.catalogue import build_catalogue
    from edgespec.registry.heads import is_head
    from edgespec.registry.schema import load_registry

    registry, hub = load_registry(), Hub.from_environment()
    backend: FileBackend = "mlx" if prefers_mlx() else "llamacpp"
    memory = host_memory()  # that of accelerators is known to the runtime alone, which is not loaded for a list
    rows = [_describe_entry(entry, registry, memory) for entry in build_catalogue(registry, hub, backend, memory)]
    heads = [each for each in hub.list_models() if is_head(each.path)]
    if as_json:
        cached = [each for each in hub.list_models() if each not in heads]
        facts = {row["name"]: row for row in rows}
        result = {
            "aliases": [
                facts[e.alias] | {b: _pair_to_json(e.pair(b)) for b in ("llamacpp", "mlx")}
                for e in registry.entries.values()
            ],
            "cached": [_describe_cached(each) for each in cached],
            "heads": [_describe_cached(each) for each in heads],
            "elsewhere": [
                {"name": row["name"], "path": row["opens"], "bytes": row["bytes"], "fit": row["fit"]}
                for row in rows
                if row["origin"] == "elsewhere"
            ],
        }
        click.echo(json.dumps(result, ensure_ascii=False))
        return
    click.echo("\n".join(_format_list(rows)))
    if heads:
        click.echo("\nTrained heads, which draft for their targets:")
    for head in heads:
        click.echo(f"{gib(head.size):>10}  {head.kind:4}  {head.reference}")


def _describe_entry(entry: CatalogueEntry, registry: Registry, memory: Memory) -> dict[str, Any]:
    """Size and fit of what is not downloaded are estimates."""
    from edgespec.hub.reference import PackagedFile
    from edgespec.planner.catalogue import rate_fit
    from edgespec.planner.model_facts import guess_facts

    size, fit = entry.target.size, entry.fit
    if size is None and entry.name in registry.entries:
        guess = guess_facts(registry.entries[entry.name].about, entry.target.reference)
        size = guess.weights if guess else None
        fit = rate_fit(guess.needed, 0, memory) if guess else None
    return {
        "name": entry.name,
        "description": entry.description,
        "origin": entry.origin,
        "opens": entry.opens,
        "bytes": size,
        "estimated": not entry.target.here,
        "fit": fit,
        "here": entry.here,
        "packaged": isinstance(entry.target.reference, PackagedFile),
    }


def _format_list(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    from edgespec.cli.table import format_table

    table = [("NAME", "SIZE", "FIT", "HERE", "DESCRIPTION")]
    for row in rows:
        size = "?" if row["bytes"] is None else gib(row["bytes"])
        about = row["opens"] if row["origin"] == "elsewhere" else row["description"]
        fit = {"does not fit": "no", None: "?"}.get(row["fit"], row["fit"])
        table.append((row["name"], f"~{size}" if row["estimated"] else size, fit, "yes" if row["here"] else "", about))
    header, *lines = format_table(table, frozenset({1}))
    titles = {"cache": "Downloaded:", "elsewhere": "Other programs' models; --model PATH loads them:"}
    yield header
    shown = "alias"
    for line, row in zip(lines, rows, strict=True):
        if row["origin"] != shown:
            shown = row["origin"]
            yield f"\n{titles[shown]}"
        yield line
    if not any(row["here"] and row["origin"] != "elsewhere" and not row["packaged"] for row in rows):
        yield "\nNo models are downloaded. `edgespec pull NAME` downloads one; `edgespec chat` needs no download."


@click.command("rm")
@click.argument("model", metavar="REF", shell_complete=complete_download)
@_backend_option
@click.option("--yes", "-y", is_flag=True, help="Do not ask for confirmation.")
def rm_command(model: str, backend: str, yes: bool) -> None:
    """Remove a downloaded model; an alias removes its target alone."""
    from edgespec.hub.hub import Hub
    from edgespec.planner.plan import LoadConfig
    from edgespec.planner.removal import resolve_download
    from edgespec.registry.schema import load_registry

    hub = Hub.from_environment()
    reference = resolve_download(LoadConfig(model, parse_backend(backend)), load_registry(), hub)
    if not yes:
        click.confirm(f"Remove {reference} from the cache?", abort=True, err=True)
    freed = hub.remove(reference)
    click.echo(f"freed {gib(freed)}", err=True)


def _pair_to_json(pair: Any) -> dict[str, object] | None:
    if pair is None:
        return None
    names = ("draft", "pard", "head")
    drafts = {name: None if (draft := getattr(pair, name)) is None else str(draft) for name in names}
    verified = {"verified": pair.verified, "head_verified": pair.head_verified}
    return {"target": str(pair.target), **drafts, "head_kind": pair.head_kind, **verified}


def _describe_cached(model: CachedModel) -> dict[str, object]:
    """A downloaded model or head."""
    place = {"commit": model.commit, "path": str(model.path)}
    return {"model": str(model.reference), "kind": model.kind, "bytes": model.size, **place}
