"""`edgespec plan`: memory, runtime, draft and expected speed of a model, before it is downloaded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.completers import complete_model
from edgespec.cli.options import draft_option, load_config, load_options, worker_options

if TYPE_CHECKING:
    from edgespec.core.protocols import CheckCancelled
    from edgespec.hub.hub import Hub
    from edgespec.planner.plan import LoadConfig, Plan
    from edgespec.registry.schema import Registry


@click.command("plan")
@click.argument("model", metavar="[REF]", required=False, shell_complete=complete_model)
@draft_option("As for run.")
@click.option("--no-speed", is_flag=True, help="Skip the measurement, which takes a few seconds.")
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout.")
@load_options
@worker_options
def plan_command(model: str | None, no_speed: bool, as_json: bool, **options: Any) -> None:
    """Show whether REF fits in memory, its runtime and draft, and its expected speed. Reads only its header.

    The speed is extrapolated from a few blocks of the same shape and quantization, measured on this machine. Where the
    header of an alias cannot be read, offline, it is estimated from what the registry says.
    """
    from edgespec.cli.terminal import TerminalReporter
    from edgespec.hub.errors import HubUnreachable
    from edgespec.hub.hub import Hub
    from edgespec.planner.plan import plan
    from edgespec.planner.report import describe_plan, describe_settings, format_plan
    from edgespec.registry.schema import load_registry

    request = replace(load_config(model, {**options, "force": True}), fetch_heads=True)
    registry, hub, reporter = load_registry(), Hub.from_environment(), TerminalReporter()
    try:
        planned = plan(request, registry, hub, reporter)
    except HubUnreachable:
        facts = _estimate(request, registry, hub, measure=not no_speed)
        if facts is None:
            raise
    else:
        for told in planned.findings:
            reporter.notice(told)
        facts = describe_plan(planned) | describe_settings(planned, hub)
        if not no_speed:
            facts |= _measure(planned)
    click.echo(json.dumps(facts, ensure_ascii=False) if as_json else "\n".join(format_plan(facts)))


def _measure(planned: Plan) -> dict[str, Any]:
    from edgespec.cli.engine import run_work
    from edgespec.cli.terminal import report_activity
    from edgespec.planner.report import describe_speed

    def work(check: CheckCancelled) -> Iterator[dict[str, Any]]:
        yield describe_speed(planned, check, report_activity)

    (speeds,) = run_work(work)
    report_activity("")
    return speeds


def _estimate(request: LoadConfig, registry: Registry, hub: Hub, *, measure: bool) -> dict[str, Any] | None:
    """By the registry alone; None where that says nothing."""
    from edgespec.cli.engine import run_work
    from edgespec.cli.terminal import report_activity
    from edgespec.planner.report import estimate_alias

    def work(check: CheckCancelled) -> Iterator[dict[str, Any] | None]:
        yield estimate_alias(request, registry, hub, check, report_activity, measure=measure)

    (facts,) = run_work(work)
    report_activity("")
    return facts
