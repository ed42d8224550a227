"""`edgespec plan`: before any download, does a model fit, what would run and draft it, and how fast would it be."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.options import load_options, open_request

if TYPE_CHECKING:
    from edgespec.core.protocols import CheckCancelled


@click.command("plan")
@click.argument("model", metavar="[REF]", required=False)
@click.option("--draft", default="auto", show_default=True, metavar="auto|model|ngram|none|REF", help="As for run.")
@click.option("--no-speed", is_flag=True, help="Leave out the measurement, which takes a few seconds.")
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout.")
@load_options
def plan_command(model: str | None, no_speed: bool, as_json: bool, **given: Any) -> None:
    """Whether REF fits, what would run and draft it, and how fast it would be here. Reads only its header.

    Speeds are put together from a few blocks of the same shape and quantization, measured on this machine.
    """
    from edgespec.cli.host import on_worker
    from edgespec.cli.terminal import TerminalReporter
    from edgespec.hub.hub import Hub
    from edgespec.planner.plan import plan
    from edgespec.planner.report import known, measured, table
    from edgespec.registry.schema import load_registry

    request = open_request(model, {**given, "force": True})
    planned = plan(request, load_registry(), Hub.from_environment(), TerminalReporter())
    facts = known(planned)
    if not no_speed:

        def work(check: CheckCancelled) -> Iterator[dict[str, Any]]:
            yield measured(planned, check)

        (speeds,) = on_worker(work)
        facts |= speeds
    click.echo(json.dumps(facts, ensure_ascii=False) if as_json else "\n".join(table(facts)))
