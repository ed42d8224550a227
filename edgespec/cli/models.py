"""`edgespec pull`, `list`, `rm`: download, list and remove models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.completion import complete_download, complete_model
from edgespec.cli.options import confirm, json_option, offer, open_hub, parse_backend, yes_option
from edgespec.cli.output import format_groups, print_result
from edgespec.cli.terminal import TerminalReporter
from edgespec.options import BACKEND, DRAFT, OPTIONS
from edgespec.progress import notice, reporting
from edgespec.units import gib

if TYPE_CHECKING:
    from edgespec.models.cache import CachedModel
    from edgespec.models.catalogue import Candidate


backend_option = offer(BACKEND, help="Runtime whose model an alias stands for.")


@click.command("pull")
@click.argument("model", metavar="REF", shell_complete=complete_model)
@offer(DRAFT, help="As for run; the models of these drafters are downloaded too.")
@offer(OPTIONS["ctx"], help="Context size for the memory check. [default: the model's, at most 8192]")
@backend_option
@click.option("--force", is_flag=True, help="Download even if memory looks insufficient.")
@click.option("--verify", is_flag=True, help="Read the downloaded files in full and compare their hashes.")
def pull_command(model: str, draft: str, ctx: int | None, backend: str, force: bool, verify: bool) -> None:
    """Download a model with its draft model and trained head, or resume a download.

    Reads the headers first: the tokenizers must match and memory must suffice.
    """
    from edgespec.backends.options import LoadOptions
    from edgespec.models.cache import RemoteModel
    from edgespec.models.load_config import LoadConfig
    from edgespec.models.plan import plan
    from edgespec.models.report import describe_faster
    from edgespec.models.resolve import fetch_source

    registry, hub = open_hub()
    options = LoadOptions(context_size=ctx)
    request = LoadConfig(model, parse_backend(backend), draft, load=options, force=force, fetch_heads=True)
    with reporting(TerminalReporter()):
        planned = plan(request, registry, hub)
        if told := describe_faster(planned.metadata):
            notice(f"{told}.")
        for source in planned.sources:
            if verify and isinstance(source, RemoteModel):
                hub.verify(source, lambda name: click.echo(f"checking {name}", err=True))
            click.echo(str(fetch_source(source, hub)))


@click.command("list")
@json_option
def list_command(as_json: bool) -> None:
    """List aliases, downloaded models, and GGUF files of LM Studio, Ollama and llama.cpp.

    Sizes with ~ are estimates for what is not downloaded. FIT compares with the RAM that is free now; `edgespec
    recommend` counts accelerators too. `--model PATH` loads a file of another program in place.
    """
    from edgespec.backends import prefers_mlx
    from edgespec.machines.memory import host_memory
    from edgespec.models.catalogue import Catalogue
    from edgespec.models.head_files import is_head

    registry, hub = open_hub()
    # The memory of accelerators is known to the runtime alone, which is not loaded for a list.
    rows = Catalogue(registry, hub, "mlx" if prefers_mlx() else "llamacpp", host_memory()).list_local()
    cached = hub.list_models()
    heads = [each for each in cached if is_head(each.path)]
    aliases = [
        _describe_candidate(each) | {b: _pair_to_json(registry.get(each.name).pair(b)) for b in ("llamacpp", "mlx")}
        for each in rows
        if each.origin == "alias"
    ]
    result = {
        "aliases": aliases,
        "cached": [_describe_cached(each) for each in cached if each not in heads],
        "heads": [_describe_cached(each) for each in heads],
        "elsewhere": [
            {"name": each.name, "path": each.opens, "bytes": each.target.size, "fit": each.fit}
            for each in rows
            if each.origin == "elsewhere"
        ],
    }
    print_result(result, _format_list(rows, heads), as_json=as_json)


def _describe_candidate(each: Candidate) -> dict[str, Any]:
    """Size and fit of what is not downloaded are estimates."""
    from edgespec.models.references import PackagedFile

    return {
        "name": each.name,
        "description": each.description,
        "origin": each.origin,
        "opens": each.opens,
        "bytes": each.target.size or each.target.missing,
        "estimated": not each.target.here,
        "fit": each.fit,
        "here": each.here,
        "packaged": isinstance(each.target.reference, PackagedFile),
    }


def _format_list(models: Sequence[Candidate], heads: Sequence[CachedModel]) -> Iterator[str]:
    table, rows = [("NAME", "SIZE", "FIT", "HERE", "DESCRIPTION")], list(map(_describe_candidate, models))
    for row in rows:
        size = "?" if row["bytes"] is None else gib(row["bytes"])
        about = row["opens"] if row["origin"] == "elsewhere" else row["description"]
        fit = {"does not fit": "no", None: "?"}.get(row["fit"], row["fit"])
        table.append((row["name"], f"~{size}" if row["estimated"] else size, fit, "yes" if row["here"] else "", about))
    titles = {"cache": "\nDownloaded:", "elsewhere": "\nOther programs' models; --model PATH loads them:"}
    yield from format_groups(table, ["alias", *(row["origin"] for row in rows)], titles, frozenset({1}))
    if not any(row["here"] and row["origin"] != "elsewhere" and not row["packaged"] for row in rows):
        yield "\nNo models are downloaded. `edgespec pull NAME` downloads one; `edgespec chat` needs no download."
    if heads:
        yield "\nTrained heads, which draft for their targets:"
    for head in heads:
        yield f"{gib(head.size):>10}  {head.kind:4}  {head.reference}"


@click.command("rm")
@click.argument("model", metavar="REF", shell_complete=complete_download)
@backend_option
@yes_option
def rm_command(model: str, backend: str, yes: bool) -> None:
    """Remove a downloaded model; an alias removes its target alone."""
    from edgespec.models.load_config import LoadConfig
    from edgespec.models.plan import resolve_download

    registry, hub = open_hub()
    reference = resolve_download(LoadConfig(model, parse_backend(backend)), registry, hub)
    ask = partial(confirm, f"Remove {reference} from the cache?")
    freed = hub.remove(reference) if yes else hub.remove(reference, ask)
    click.echo(f"freed {gib(freed)}", err=True)


def _pair_to_json(pair: Any) -> dict[str, object] | None:
    if pair is None:
        return None
    names = ("target", "draft", "pard", "head", "head_kind", "verified", "head_verified")
    values = {name: getattr(pair, name) for name in names}
    return {name: value if isinstance(value, bool | None) else str(value) for name, value in values.items()}


def _describe_cached(model: CachedModel) -> dict[str, object]:
    place = {"commit": model.commit, "path": str(model.path)}
    return {"model": str(model.reference), "kind": model.kind, "bytes": model.size, **place}
