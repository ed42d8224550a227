"""`edgespec pull`, `list`, `rm`: download, list and remove models."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.completers import complete_download, complete_model
from edgespec.cli.options import backend_option, draft_option, parse_backend

if TYPE_CHECKING:
    from edgespec.hub.cache import CachedModel
    from edgespec.hub.reference import Reference


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
    from edgespec.registry.resolve import HubGguf, HubMlx
    from edgespec.registry.schema import load_registry

    hub, reporter = Hub.from_environment(), TerminalReporter()
    options = LoadOptions(context_size=ctx)
    request = LoadConfig(model, parse_backend(backend), draft, load=options, force=force, fetch_heads=True)
    planned = plan(request, load_registry(), hub, reporter)
    sources = [planned.target, *(each.source for each in planned.models)]
    for source in (each for i, each in enumerate(sources) if each not in sources[:i]):  # a head may be in the target
        if verify and isinstance(source, HubGguf | HubMlx):
            hub.verify(source.model, lambda name: click.echo(f"checking {name}", err=True))
        click.echo(str(fetch(source, hub, reporter)))


@click.command("list")
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout.")
def list_command(as_json: bool) -> None:
    """List aliases, downloaded models, and GGUF files of LM Studio, Ollama and llama.cpp.

    `--model PATH` loads a file of another program in place.
    """
    from edgespec.hub.hub import Hub
    from edgespec.registry.external_models import find_external_models
    from edgespec.registry.heads import is_head
    from edgespec.registry.schema import load_registry
    from edgespec.units import gib

    entries = load_registry().entries.values()
    downloads = Hub.from_environment().list_models()
    heads = [each for each in downloads if is_head(each.path)]
    cached = [each for each in downloads if each not in heads]
    others = find_external_models(exclude=[model.path for model in downloads])
    if as_json:
        result = {
            "aliases": [
                {
                    "name": e.alias,
                    "description": e.description,
                    **{b: _pair_to_json(e.pair(b)) for b in ("llamacpp", "mlx")},
                }
                for e in entries
            ],
            "cached": [_describe_cached(each) for each in cached],
            "heads": [_describe_cached(each) for each in heads],
            "elsewhere": [{"name": m.name, "path": str(m.path), "bytes": m.size} for m in others],
        }
        click.echo(json.dumps(result, ensure_ascii=False))
        return
    width = max(len(entry.alias) for entry in entries)
    for entry in entries:
        click.echo(f"{entry.alias:{width}}  {entry.description}")
    click.echo()
    if not cached:
        click.echo("No models are downloaded. `edgespec pull NAME` downloads one; `edgespec chat` needs no download.")
    for found in sorted(cached, key=lambda m: -m.last_used_s):
        click.echo(f"{gib(found.size):>10}  {found.kind:4}  {found.reference}")
    if heads:
        click.echo("\nTrained heads, which draft for their targets:")
    for head in heads:
        click.echo(f"{gib(head.size):>10}  {head.kind:4}  {head.reference}")
    if others:
        click.echo("\nOther programs' models; --model PATH loads them:")
    for other in others:
        click.echo(f"{gib(other.size):>10}  {other.name}  {other.path}")


@click.command("rm")
@click.argument("model", metavar="REF", shell_complete=complete_download)
@_backend_option
@click.option("--yes", "-y", is_flag=True, help="Do not ask for confirmation.")
def rm_command(model: str, backend: str, yes: bool) -> None:
    """Remove a downloaded model; an alias removes its target alone."""
    from edgespec.errors import UnknownModel
    from edgespec.hub.hub import Hub
    from edgespec.hub.reference import Alias, HubFile, HubQuant, HubRepo, parse_reference
    from edgespec.planner.plan import LoadConfig, choose_backend
    from edgespec.registry.schema import load_registry
    from edgespec.units import gib

    reference: Reference = parse_reference(model)
    if isinstance(reference, Alias):
        request, registry = LoadConfig(model, parse_backend(backend)), load_registry()
        pair = registry.get(reference.name).pair(choose_backend(request, registry, Hub.from_environment()))
        reference = pair.target if pair else reference
    if not isinstance(reference, HubRepo | HubQuant | HubFile):
        raise UnknownModel(f"{model} is not a downloaded model.", hint="`edgespec list` shows the downloaded models.")
    if not yes:
        click.confirm(f"Remove {reference} from the cache?", abort=True, err=True)
    freed = Hub.from_environment().remove(reference)
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
