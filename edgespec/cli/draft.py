"""`edgespec draft`: prepare, list and remove what models need to draft for themselves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.options import load_options, open_request

if TYPE_CHECKING:
    from edgespec.core.protocols import CheckCancelled
    from edgespec.planner.selfdraft_search import Choice


RIVAL = "draft model"


@click.group("draft")
def draft_command() -> None:
    """Drafts that models make of themselves: fewer layers, fewer bits, less context."""


@draft_command.command("build")
@click.argument("model", metavar="[REF]", required=False)
@click.option(
    "--draft",
    "methods",
    multiple=True,
    metavar="METHOD",
    help="layerskip, qspec:BITS, planes, sparse, joined by '+'; repeatable. [default: all that may pay]",
)
@click.option("--seconds", type=click.FloatRange(1), default=120, show_default=True, help="Time for searching layers.")
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout.")
@load_options
def build_command(
    model: str | None, methods: tuple[str, ...], seconds: float, as_json: bool, **given: Any
) -> None:  # fmt: skip
    """Make REF's low-bit copies, search the layers it can do without, try all of it, and keep the best for `auto`.

    A draft model that is paired with REF is tried beside them. Ctrl-C keeps the copies that are finished.
    """
    from edgespec.backends.attached_draft import parse
    from edgespec.cli.host import on_worker
    from edgespec.cli.terminal import TerminalReporter
    from edgespec.errors import InvalidRequest
    from edgespec.hub.hub import Hub
    from edgespec.planner.selfdraft_search import SelfDraftSearch
    from edgespec.registry.schema import load_registry
    from edgespec.service.load import build_drafts

    asked = []
    for text in methods:
        if (method := parse(text)) is None:
            raise InvalidRequest(f"'{text}' is no self-draft.", hint="Use layerskip, qspec, planes or sparse.")
        asked.append(method)
    request = open_request(model, {**given, "draft": "auto"})
    reporter = TerminalReporter()

    def work(check: CheckCancelled) -> Iterator[tuple[SelfDraftSearch, Choice]]:
        yield build_drafts(request, asked, seconds, load_registry(), Hub.from_environment(), reporter, check)

    ((workshop, choice),) = on_worker(work)
    tried = {**workshop.trials, **({RIVAL: workshop.rival} if workshop.rival else {})}
    rows = sorted(tried.items(), key=lambda each: -each[1].speedup)
    if as_json:
        result = {name: asdict(trial) for name, trial in rows}
        rival = result.pop(RIVAL, None)
        click.echo(json.dumps({"best": str(choice.method), "pays": choice.pays, "trials": result, RIVAL: rival}))
        return
    width = max(len(name) for name, _ in rows)
    click.echo(f"{'draft':{width}}  agreement  cost of a token  length  x plain, foretold")
    for name, t in rows:
        click.echo(f"{name:{width}}  {t.agreement:9.0%}  {t.cost:15.2f}  {t.length:6}  {t.speedup:.2f}")
    click.echo(
        f"best: {choice.method}" if choice.pays else "none promises more than what there is; `auto` goes on without"
    )


@draft_command.command("list")
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout.")
def list_command(as_json: bool) -> None:
    """What is kept for self-drafts, by model."""
    from edgespec.planner.selfdraft_search import kept
    from edgespec.units import gib

    found = kept()
    if as_json:
        click.echo(json.dumps([
            {"model": k.model, "bytes": k.size, "copies": [str(c) for c in k.copies], "choices": list(k.choices)}
            for k in found
        ]))  # fmt: skip
        return
    if not found:
        click.echo("Nothing kept yet; `edgespec draft build NAME` prepares a model's self-drafts.")
    for each in found:
        click.echo(f"{gib(each.size):>10}  {each.model}")
        for line in (*(copy.name for copy in each.copies), *each.choices):
            click.echo(f"{'':12}{line}")


@draft_command.command("rm")
@click.argument("model", metavar="NAME")
def rm_command(model: str) -> None:
    """Remove what is kept for NAME, as `edgespec draft list` shows it; `all` removes everything."""
    from edgespec.errors import UnknownModel
    from edgespec.planner.selfdraft_search import kept, remove
    from edgespec.units import gib

    found = [each for each in kept() if model in ("all", each.model)]
    if not found:
        raise UnknownModel(f"nothing is kept for '{model}'.", hint="`edgespec draft list` shows the names.")
    click.echo(f"freed {gib(sum(remove(each) for each in found))}", err=True)
