"""`edgespec plan`: memory, runtime, draft and expected speed of a model, before it is downloaded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.options import json_option, load_config, load_options, model_argument, offer, open_hub, worker_options
from edgespec.cli.output import print_result
from edgespec.cli.terminal import TerminalReporter, report_activity
from edgespec.models.hub_errors import HubUnreachable
from edgespec.options import DRAFT
from edgespec.progress import reporting
from edgespec.units import gib

if TYPE_CHECKING:
    from edgespec.backends import FileBackend
    from edgespec.models.hub import Hub
    from edgespec.models.load_config import LoadConfig
    from edgespec.models.registry import Registry


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
    from edgespec.models.report import PlanReport, report_plan
    from edgespec.models.report_text import format_plan

    request = replace(load_config(model, {**options, "force": True}), fetch_heads=True)
    registry, hub = open_hub()

    def work() -> Iterator[PlanReport]:
        yield from report_plan(request, registry, hub, report_activity, measure=not no_speed)

    try:
        with reporting(TerminalReporter()):
            *_, report = work() if no_speed else run_work(work)
    except HubUnreachable as error:
        report_activity("")
        _plan_by_registry(request, registry, hub, error, as_json=as_json)
        return
    report_activity("")
    print_result(report.to_dict(), format_plan(report), as_json=as_json)


def _plan_by_registry(
    request: LoadConfig, registry: Registry, hub: Hub, error: HubUnreachable, *, as_json: bool
) -> None:
    """Show what the registry foretells of an alias whose files cannot be read. Raises `error` for another model."""
    from edgespec.backends import prefers_mlx
    from edgespec.models.catalogue import Catalogue, Query, format_download, format_drafted, format_plain
    from edgespec.models.fit import read_memory

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
