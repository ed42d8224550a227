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


@click.command("plan")
@click.argument("model", metavar="[REF]", required=False, shell_complete=complete_model)
@draft_option("As for run.")
@click.option("--no-speed", is_flag=True, help="Skip the measurement, which takes a few seconds.")
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout.")
@load_options
@worker_options
def plan_command(model: str | None, no_speed: bool, as_json: bool, **options: Any) -> None:
    """Show whether REF fits in memory, its runtime and draft, and its expected speed. Reads only its header.

    The speed is extrapolated from a few blocks of the same shape and quantization, measured on this machine.
    """
    from edgespec.cli.engine import run_work
    from edgespec.cli.terminal import TerminalReporter
    from edgespec.hub.hub import Hub
    from edgespec.planner.plan import plan
    from edgespec.planner.report import describe_plan, describe_settings, describe_speed, format_plan
    from edgespec.registry.schema import load_registry

    request = replace(load_config(model, {**options, "force": True}), fetch_heads=True)
    hub = Hub.from_environment()
    reporter = TerminalReporter()
    planned = plan(request, load_registry(), hub, reporter)
    for told in planned.findings:
        reporter.notice(told)
    facts = describe_plan(planned) | describe_settings(planned, hub)
    if not no_speed:

        def work(check: CheckCancelled) -> Iterator[dict[str, Any]]:
            yield describe_speed(planned, check)

        (speeds,) = run_work(work)
        facts |= speeds
    click.echo(json.dumps(facts, ensure_ascii=False) if as_json else "\n".join(format_plan(facts)))
