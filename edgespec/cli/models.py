"""`edgespec pull`, `list`, `show`, `rm`: the models there are, and the ones that are here."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from edgespec.registry.gguf import Header
    from edgespec.registry.reference import Reference


@click.command("pull")
@click.argument("model", metavar="REF")
@click.option(
    "--draft",
    default="auto",
    show_default=True,
    metavar="auto|model|none|REF",
    help="The draft model to fetch along: the registry's, none, or one of your choice.",
)
@click.option("--ctx", type=click.IntRange(8), help="Context size to price. [default: the model's, at most 8192]")
@click.option("--force", is_flag=True, help="Download even if the memory looks too small.")
@click.option("--verify", is_flag=True, help="Read what is already here in full and compare its hash.")
def pull_command(model: str, draft: str, ctx: int | None, force: bool, verify: bool) -> None:  # fmt: skip
    """Download a model and its draft, or resume a download.

    Before the weights, the headers are read: tokenizers must match, and the memory must suffice.
    """
    from edgespec.backends.options import LoadOptions
    from edgespec.cli.terminal import TerminalReporter
    from edgespec.planning import OpenRequest, fetch, plan
    from edgespec.registry.hub import Hub
    from edgespec.registry.resolve import HubGguf, HubMlx
    from edgespec.registry.schema import load_registry

    hub, reporter = Hub.from_environment(), TerminalReporter()
    request = OpenRequest(model=model, draft=draft, load=LoadOptions(context_size=ctx), force=force)
    planned = plan(request, load_registry(), hub, reporter)
    for source in (planned.target, *((planned.draft.source,) if planned.draft else ())):
        if verify and isinstance(source, HubGguf | HubMlx):
            hub.verify(source.model, lambda name: click.echo(f"checking {name}", err=True))
        click.echo(str(fetch(source, hub, reporter)))


@click.command("list")
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout.")
def list_command(as_json: bool) -> None:
    """The aliases that edgespec knows, and the models in the cache."""
    from edgespec.registry.fit import gib
    from edgespec.registry.hub import Hub
    from edgespec.registry.schema import load_registry

    entries = load_registry().entries.values()
    cached = Hub.from_environment().cached_models()
    if as_json:
        result = {
            "aliases": [
                {"name": e.alias, "description": e.description, **{b: _pair(e.pair(b)) for b in ("llamacpp", "mlx")}}
                for e in entries
            ],
            "cached": [
                {"model": str(m.reference), "kind": m.kind, "bytes": m.size, "commit": m.commit, "path": str(m.path)}
                for m in cached
            ],
        }
        click.echo(json.dumps(result, ensure_ascii=False))
        return
    width = max(len(entry.alias) for entry in entries)
    for entry in entries:
        click.echo(f"{entry.alias:{width}}  {entry.description}")
    click.echo()
    if not cached:
        click.echo("Nothing downloaded yet; `edgespec pull NAME` downloads, `edgespec chat` needs no download.")
    for found in sorted(cached, key=lambda m: -m.last_used_s):
        click.echo(f"{gib(found.size):>10}  {found.kind:4}  {found.reference}")


@click.command("show")
@click.argument("model", metavar="[REF]", required=False)
@click.option("--ctx", type=click.IntRange(8), help="Context size to price. [default: the model's, at most 8192]")
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout.")
def show_command(model: str | None, ctx: int | None, as_json: bool) -> None:
    """What a model is: architecture, sizes, memory, draft. Reads only the header of what is not downloaded."""
    from edgespec.backends.options import DEFAULT_CONTEXT
    from edgespec.registry.fit import gib, price
    from edgespec.registry.hub import Hub
    from edgespec.registry.resolve import open_pair, source_header
    from edgespec.registry.schema import load_registry

    hub = Hub.from_environment()
    resolved = open_pair(model, "llamacpp", load_registry(), hub)
    source: Any = resolved.target
    header = source_header(source, hub)
    context = ctx or min(header.own("context_length") or DEFAULT_CONTEXT, DEFAULT_CONTEXT)
    cost = price(header, context)
    facts: dict[str, Any] = {
        "name": resolved.name,
        "file": header.name,
        "architecture": header.architecture,
        "parameters": sum(_elements(tensor.shape) for tensor in header.tensors),
        "layers": header.own("block_count"),
        "embedding": header.own("embedding_length"),
        "trained_context": header.own("context_length"),
        "vocabulary": _length(header, "tokenizer.ggml.tokens"),
        "tensor_types": _tensor_types(header),
        "chat_template": "tokenizer.chat_template" in header.metadata,
        "draft": None if resolved.draft is None else str(resolved.draft),
        "context": context,
        "weights_bytes": cost.weights,
        "kv_bytes": cost.kv,
        "memory_bytes": cost.total,
    }
    if as_json:
        click.echo(json.dumps(facts, ensure_ascii=False))
        return
    for key, value in facts.items():
        if key.endswith("_bytes"):
            shown = gib(value)
        elif isinstance(value, bool):
            shown = "yes" if value else "no"
        elif isinstance(value, int):
            shown = f"{value:,}"
        else:
            shown = "n-grams" if value is None else str(value)
        click.echo(f"{key.removesuffix('_bytes').replace('_', ' '):16} {shown}")


@click.command("rm")
@click.argument("model", metavar="REF")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
def rm_command(model: str, yes: bool) -> None:
    """Remove a downloaded model from the cache; an alias removes its target, not its draft."""
    from edgespec.errors import UnknownModel
    from edgespec.registry.fit import gib
    from edgespec.registry.hub import Hub
    from edgespec.registry.reference import Alias, HubFile, HubQuant, HubRepo, parse_reference
    from edgespec.registry.schema import load_registry

    reference: Reference = parse_reference(model)
    if isinstance(reference, Alias):
        pair = load_registry().get(reference.name).pair("llamacpp")
        reference = pair.target if pair else reference
    if not isinstance(reference, HubRepo | HubQuant | HubFile):
        raise UnknownModel(f"{model} is not a downloaded model.", hint="`edgespec list` shows what can be removed.")
    if not yes:
        click.confirm(f"Remove {reference} from the cache?", abort=True, err=True)
    freed = Hub.from_environment().remove(reference)
    click.echo(f"freed {gib(freed)}", err=True)


def _pair(pair: Any) -> dict[str, object] | None:
    if pair is None:
        return None
    return {"target": str(pair.target), "draft": str(pair.draft) if pair.draft else None, "verified": pair.verified}


def _elements(shape: tuple[int, ...]) -> int:
    n = 1
    for each in shape:
        n *= each
    return n


def _length(header: Header, key: str) -> int:
    value = header.metadata.get(key)
    return len(value) if isinstance(value, list) else 0


def _tensor_types(header: Header) -> str:
    """Types by share of the weights' bytes, such as 'Q4_K 85%, Q6_K 14%'."""
    sizes: dict[str, int] = {}
    for tensor in header.tensors:
        sizes[tensor.type.name] = sizes.get(tensor.type.name, 0) + tensor.nbytes
    ranked = sorted(sizes.items(), key=lambda item: -item[1])
    return ", ".join(
        f"{name} {size / header.weight_bytes:.0%}" for name, size in ranked if size * 100 > header.weight_bytes
    )
