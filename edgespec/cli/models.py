"""`edgespec pull`, `list`, `rm`: download, list and remove models."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.completion import complete_download, complete_model
from edgespec.cli.options import (
    FloatRange,
    confirm,
    json_option,
    load_config,
    load_options,
    model_argument,
    offer,
    open_hub,
    parse_backend,
    worker_options,
    yes_option,
)
from edgespec.cli.terminal import TerminalReporter, format_groups, print_result, report_activity, shorten
from edgespec.hub.errors import HubUnreachable
from edgespec.options import BACKEND, DRAFT, OPTIONS
from edgespec.units import GIB, gib

if TYPE_CHECKING:
    from edgespec.backends import FileBackend
    from edgespec.core.protocols import CheckCancelled
    from edgespec.formats.gguf import Header
    from edgespec.formats.mlx_folder import Folder
    from edgespec.hub.cache import CachedModel
    from edgespec.hub.hub import Hub
    from edgespec.planner.catalogue import Candidate, Recommendations
    from edgespec.planner.plan import LoadConfig
    from edgespec.registry.schema import Registry, Task


TASKS = ("chat", "code", "reasoning")  # those of registry.schema.Task, whose module takes long to import
_backend_option = offer(BACKEND, help="Runtime whose model an alias stands for.")


@click.command("pull")
@click.argument("model", metavar="REF", shell_complete=complete_model)
@offer(DRAFT, help="As for run; the models of these drafters are downloaded too.")
@offer(OPTIONS["ctx"], help="Context size for the memory check. [default: the model's, at most 8192]")
@_backend_option
@click.option("--force", is_flag=True, help="Download even if memory looks insufficient.")
@click.option("--verify", is_flag=True, help="Read the downloaded files in full and compare their hashes.")
def pull_command(model: str, draft: str, ctx: int | None, backend: str, force: bool, verify: bool) -> None:
    """Download a model with its draft model and trained head, or resume a download.

    Reads the headers first: the tokenizers must match and memory must suffice.
    """
    from edgespec.backends.options import LoadOptions
    from edgespec.hub.cache import RemoteModel
    from edgespec.planner.plan import LoadConfig, fetch, plan
    from edgespec.planner.report import describe_faster

    registry, hub = open_hub()
    reporter, options = TerminalReporter(), LoadOptions(context_size=ctx)
    request = LoadConfig(model, parse_backend(backend), draft, load=options, force=force, fetch_heads=True)
    planned = plan(request, registry, hub, reporter)
    if told := describe_faster(planned.metadata):
        reporter.notice(f"{told}.")
    for source in planned.sources:
        if verify and isinstance(source, RemoteModel):
            hub.verify(source, lambda name: click.echo(f"checking {name}", err=True))
        click.echo(str(fetch(source, hub, reporter)))


@click.command("list")
@json_option
def list_command(as_json: bool) -> None:
    """List aliases, downloaded models, and GGUF files of LM Studio, Ollama and llama.cpp.

    Sizes with ~ are estimates for what is not downloaded. FIT compares with the RAM that is free now; `edgespec
    recommend` counts accelerators too. `--model PATH` loads a file of another program in place.
    """
    from edgespec.backends import prefers_mlx
    from edgespec.backends.devices import host_memory
    from edgespec.planner.catalogue import Catalogue
    from edgespec.registry.resolve import is_head

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
    from edgespec.hub.cache import PackagedFile

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
@_backend_option
@yes_option
def rm_command(model: str, backend: str, yes: bool) -> None:
    """Remove a downloaded model; an alias removes its target alone."""
    from edgespec.planner.plan import LoadConfig, resolve_download

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


# `edgespec show`: describe a model before it is downloaded.


@click.command("show")
@model_argument
@offer(OPTIONS["ctx"], help="Context size for the memory estimate. [default: the model's, at most 8192]")
@_backend_option
@json_option
def show_command(model: str | None, ctx: int | None, backend: str, as_json: bool) -> None:
    """Show a model's architecture, size, memory and draft. Reads only the header if it is not downloaded."""
    from edgespec.backends.options import LoadOptions
    from edgespec.formats.mlx_folder import Folder
    from edgespec.planner.heads import find_head
    from edgespec.planner.memory import estimate_memory
    from edgespec.planner.plan import LoadConfig, choose_backend
    from edgespec.planner.report import format_facts
    from edgespec.registry.resolve import read_metadata, resolve_pair

    registry, hub = open_hub()
    chosen = choose_backend(LoadConfig(model, parse_backend(backend)), registry, hub)
    resolved = resolve_pair(model, chosen, registry, hub)
    found = read_metadata(resolved.target, hub)
    own = find_head(found)
    drafters = {
        "pard": resolved.models.pard and str(resolved.models.pard),
        "head": resolved.models.head and str(resolved.models.head),
        "own_head": own.kind if own is not None and own.in_target else None,
    }
    context = LoadOptions(ctx).context_for(found.trained_context)
    cost = estimate_memory(found, context)
    facts: dict[str, Any] = {
        "name": resolved.name,
        "backend": chosen,
        **(_describe_folder(found) if isinstance(found, Folder) else _describe_gguf(found)),
        "draft": None if resolved.models.draft is None else str(resolved.models.draft),
        **{name: value for name, value in drafters.items() if value is not None},
        "context": context,
        "weights_bytes": cost.weights,
        "kv_bytes": cost.kv,
        "memory_bytes": cost.total,
    }
    print_result(facts, format_facts(facts), as_json=as_json)


def _describe_gguf(header: Header) -> dict[str, Any]:
    from edgespec.registry.resolve import find_template

    return {
        "file": header.name,
        "architecture": header.architecture,
        "parameters": sum(math.prod(tensor.shape) for tensor in header.tensors),
        "layers": header.own("block_count"),
        "embedding": header.own("embedding_length"),
        "trained_context": header.trained_context,
        "vocabulary": len(header.tokens),
        "tensor_types": _format_tensor_types(header),
        "chat_template": _describe_template(find_template(header)),
    }


def _describe_folder(folder: Folder) -> dict[str, Any]:
    from edgespec.registry.resolve import find_template

    return {
        "file": folder.name,
        "architecture": folder.config.get("model_type", "none"),
        "layers": folder.integer("num_hidden_layers"),
        "embedding": folder.integer("hidden_size"),
        "trained_context": folder.trained_context,
        "vocabulary": folder.integer("vocab_size"),
        "quantization": folder.quantization,
        "chat_template": _describe_template(find_template(folder)),
    }


def _describe_template(source: str | None) -> dict[str, str] | None:
    """What a chat template shows of conversations, and how its model writes calls; None without one."""
    from edgespec.text.chat_template import profile_template

    return profile_template(source).describe() if source is not None else None


def _format_tensor_types(header: Header) -> str:
    """Tensor types by share of the weights' bytes, such as 'Q4_K 85%, Q6_K 14%'."""
    sizes: dict[str, int] = {}
    for tensor in header.tensors:
        sizes[tensor.type.name] = sizes.get(tensor.type.name, 0) + tensor.nbytes
    ranked = sorted(sizes.items(), key=lambda item: -item[1])
    return ", ".join(
        f"{name} {size / header.weight_bytes:.0%}" for name, size in ranked if size * 100 > header.weight_bytes
    )


# `edgespec plan`: memory, runtime, draft and expected speed of a model, before it is downloaded.


@click.command("plan")
@model_argument
@offer(DRAFT, help="As for run.")
@click.option("--no-speed", is_flag=True, help="Skip the measurement, which takes a few seconds.")
@json_option
@load_options
@worker_options
def plan_command(model: str | None, no_speed: bool, as_json: bool, **options: Any) -> None:
    """Show whether REF fits in memory, its runtime and draft, and its expected speed. Reads only its header.

    The speed is estimated from how fast this machine reads weights of each type, which is measured once.
    """
    from edgespec.cli.engine import run_work
    from edgespec.planner.report import format_plan, report_plan

    request = replace(load_config(model, {**options, "force": True}), fetch_heads=True)
    registry, hub = open_hub()

    def work(check: CheckCancelled) -> Iterator[dict[str, Any]]:
        yield from report_plan(request, registry, hub, TerminalReporter(), check, report_activity, measure=not no_speed)

    try:
        *_, facts = work(lambda: None) if no_speed else run_work(work)
    except HubUnreachable as error:
        report_activity("")
        _plan_by_registry(request, registry, hub, error, as_json=as_json)
        return
    report_activity("")
    print_result(facts, format_plan(facts), as_json=as_json)


def _plan_by_registry(
    request: LoadConfig, registry: Registry, hub: Hub, error: HubUnreachable, *, as_json: bool
) -> None:
    """Show what the registry foretells of an alias whose files cannot be read. Raises `error` for another model."""
    from edgespec.backends import prefers_mlx
    from edgespec.planner.catalogue import Catalogue, Query, format_download, format_drafted, format_plain
    from edgespec.planner.memory import read_memory

    name = request.model or registry.default
    if name not in registry.entries or request.backend == "toy":
        raise error
    backend: FileBackend = request.backend or ("mlx" if prefers_mlx() else "llamacpp")
    catalogue = Catalogue(registry, replace(hub, offline=True), backend, read_memory(backend))
    found = next((each for each in catalogue.recommend(Query(name), measure=False).models if each.name == name), None)
    if found is None:
        raise error
    facts = found.to_dict() | {"target": str(found.target.reference)}
    needed, drafted = facts["memory_bytes"], format_drafted(found)
    with_draft = f", with its draft {drafted}" if drafted else ""
    lines = [
        f"{name}: {found.description}",
        f"model      {found.target.reference}",
        *([f"draft      {found.draft.reference}"] if found.draft is not None else []),
        f"download   {format_download(found)}",
        f"memory     {'not known' if needed is None else f'about {gib(needed)}: {found.fit}'}",
        f"speed      {f'about {format_plain(found)} tokens/s{with_draft}' if found.plain else 'not measured yet'}",
    ]
    print_result(facts, lines, as_json=as_json)
    cause = error.__cause__ if isinstance(error.__cause__, HubUnreachable) else error
    click.echo(f"note: {cause.message} These are estimates from the registry.", err=True)


# `edgespec recommend`: the models that suit this machine.


@click.command("recommend")
@click.argument("words", nargs=-1, metavar="[TEXT]...")
@click.option("--for", "task", type=click.Choice(TASKS), help="What the model is for.")
@click.option("--max-size", type=FloatRange(0, 2**20, min_open=True), metavar="GIB", help="Maximum download size.")
@offer(BACKEND, help="Runtime that is to run the models.")
@click.option("--again", is_flag=True, help="Measure this machine again, such as when it was busy the first time.")
@click.option("--no-speed", is_flag=True, help="Skip the measurement, which takes some seconds once.")
@json_option
def recommend_command(
    words: tuple[str, ...],
    task: Task | None,
    max_size: float | None,
    backend: str,
    again: bool,
    no_speed: bool,
    as_json: bool,
) -> None:
    """List models for this machine: those of the registry, and with TEXT or --for those of a search of the hub.

    Only the sizes of files are read. The order: models that fit in the free memory at 20 tokens/s or more (50 ms a
    token), the largest first; slower ones, the fastest first; those whose speed is not known; those that do not fit.

    Speeds are extrapolated from a measurement of this machine with weights of each type; DRAFTED is the range with
    the draft model, at low and high acceptance, and is empty where the text decides what drafts gain. QUALITY follows
    from the number of parameters alone: toy, simple (from 1 billion), fair (3), good (7), strong (20), best (60).
    """
    from edgespec.backends import prefers_mlx
    from edgespec.cli.engine import run_work
    from edgespec.planner.catalogue import Catalogue, Query
    from edgespec.planner.memory import read_memory

    chosen = parse_backend(backend) or ("mlx" if prefers_mlx() else "llamacpp")
    assert chosen != "toy"
    query = Query(" ".join(words), task, None if max_size is None else int(max_size * GIB))
    registry, hub = open_hub()

    def work(check: CheckCancelled) -> Iterator[Recommendations]:
        catalogue = Catalogue(registry, hub, chosen, read_memory(chosen), check)
        yield catalogue.recommend(query, report_activity, measure=not no_speed, again=again)

    (found,) = run_work(work)
    report_activity("")
    costs = found.speed.compare_types()
    facts = {
        "models": [each.to_dict() for each in found.models],
        "notices": list(found.notices),
        "advice": found.advice,
        "weight_cost": {name: round(cost, 2) for name, cost in costs.items()},
    }
    print_result(facts, _format(found.models), as_json=as_json)
    if as_json:
        return
    told = [f"note: {notice}" for notice in found.notices]
    if found.models:
        types = ", ".join(f"{name} {cost:.1f}" for name, cost in costs.items())
        told += [f"Time of a weight on this machine, by type: {types}."] if costs else []
        told += found.advice
        told.append("`edgespec plan NAME` measures one of them, `edgespec chat NAME` downloads and opens it.")
    for line in told:
        click.echo(line, err=True)


def _format(models: Sequence[Candidate]) -> Iterator[str]:
    from edgespec.planner.catalogue import GROUPS

    if not models:
        yield "No model matches."
        return
    header = ("NAME", "QUALITY", "DOWNLOAD", "TOK/S", "DRAFTED", "LICENSE")
    titles: dict[str, str] = {group: f"\n{title}:" for group, title in GROUPS.items()}
    groups = [each.group for each in models]
    yield from format_groups([header, *map(_to_row, models)], ["", *groups], titles, frozenset({2, 3, 4}))
    yield ""


def _to_row(model: Candidate) -> tuple[str, ...]:
    from edgespec.planner.catalogue import format_download, format_drafted, format_plain

    licensed = shorten(model.about.license or "?", 12) + (" (tight)" if model.fit == "tight" else "")
    speeds = format_plain(model), format_drafted(model)
    return model.name, model.quality, format_download(model), *speeds, licensed
