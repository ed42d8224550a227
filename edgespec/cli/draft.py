"""`edgespec draft`: prepare, list and remove self-drafts; probe trained heads; serve drafts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.completers import complete_model, complete_self_drafts
from edgespec.cli.draft_serve import serve_command
from edgespec.cli.options import draft_option, load_config, load_options

if TYPE_CHECKING:
    from edgespec.core.protocols import CheckCancelled
    from edgespec.formats.heads import HeadSpec
    from edgespec.planner.head_probe import ProbeResult, Trial
    from edgespec.planner.selfdraft_search import Choice


RIVAL = "draft model"


@click.group("draft")
def draft_command() -> None:
    """Self-drafts: a model drafts with fewer of its layers, fewer bits or less context. Probes of trained heads. Drafts
    for targets on other machines.
    """


draft_command.add_command(serve_command)


@draft_command.command("build")
@click.argument("model", metavar="[REF]", required=False, shell_complete=complete_model)
@click.option(
    "--draft",
    "methods",
    multiple=True,
    metavar="METHOD",
    help="layerskip, qspec:BITS, sparse, joined by '+'; repeatable. [default: all]",
)
@click.option("--seconds", type=click.FloatRange(1), default=120, show_default=True, help="Time for the layer search.")
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout.")
@load_options
def build_command(model: str | None, methods: tuple[str, ...], seconds: float, as_json: bool, **options: Any) -> None:
    """Find the best self-draft of REF and remember it for `--draft auto`.

    Makes low-bit copies, searches for layers to skip, and measures each candidate and the paired draft model. Ctrl-C
    keeps the finished copies.
    """
    from edgespec.backends.attached_draft import parse
    from edgespec.cli.engine import run_work
    from edgespec.cli.terminal import TerminalReporter
    from edgespec.errors import InvalidRequest
    from edgespec.planner.selfdraft_search import SelfDraftSearch
    from edgespec.service.load import Loader

    specs = []
    for text in methods:
        if (spec := parse(text)) is None:
            raise InvalidRequest(f"'{text}' is not a self-draft.", hint="Use layerskip, qspec or sparse.")
        specs.append(spec)
    request = load_config(model, {**options, "draft": "auto"})
    reporter = TerminalReporter()

    def work(check: CheckCancelled) -> Iterator[tuple[SelfDraftSearch, Choice]]:
        yield Loader(reporter, check).search_self_draft(request, specs, seconds)

    ((search, choice),) = run_work(work)
    tried = {**search.trials, **({RIVAL: search.rival} if search.rival else {})}
    rows = sorted(tried.items(), key=lambda each: -each[1].speedup)
    if as_json:
        result = {name: asdict(trial) for name, trial in rows}
        rival = result.pop(RIVAL, None)
        click.echo(json.dumps({"best": str(choice.method), "pays": choice.pays, "trials": result, RIVAL: rival}))
        return
    width = max(len(name) for name, _ in rows)
    click.echo(f"{'draft':{width}}  agreement  cost of a token  length  x plain, expected")
    for name, t in rows:
        click.echo(f"{name:{width}}  {t.agreement:9.0%}  {t.cost:15.2f}  {t.length:6}  {t.speedup:.2f}")
    click.echo(
        f"best: {choice.method}" if choice.pays else "no self-draft is expected to pay; `--draft auto` uses none"
    )


@draft_command.command("list")
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout.")
def list_command(as_json: bool) -> None:
    """List cached self-drafts by model."""
    from edgespec.planner.selfdraft_search import list_cached_drafts
    from edgespec.units import gib

    found = list_cached_drafts()
    if as_json:
        click.echo(
            json.dumps(
                [
                    {
                        "model": k.model,
                        "bytes": k.size,
                        "copies": [str(c) for c in k.copies],
                        "choices": list(k.choices),
                    }
                    for k in found
                ]
            )
        )
        return
    if not found:
        click.echo("No self-drafts are cached; `edgespec draft build NAME` makes them.")
    for each in found:
        click.echo(f"{gib(each.size):>10}  {each.model}")
        for line in (*(copy.name for copy in each.copies), *each.choices):
            click.echo(f"{'':12}{line}")


@draft_command.command("rm", short_help="Remove cached self-drafts of a model, or all.")
@click.argument("model", metavar="NAME", shell_complete=complete_self_drafts)
def rm_command(model: str) -> None:
    """Remove the cached self-drafts of NAME, as `edgespec draft list` shows it; `all` removes everything."""
    from edgespec.errors import UnknownModel
    from edgespec.planner.selfdraft_search import list_cached_drafts, remove_cached_draft
    from edgespec.units import gib

    found = [each for each in list_cached_drafts() if model in ("all", each.model)]
    if not found:
        raise UnknownModel(
            f"there are no cached self-drafts of '{model}'.", hint="`edgespec draft list` shows the names."
        )
    click.echo(f"freed {gib(sum(remove_cached_draft(each) for each in found))}", err=True)


@draft_command.command("probe")
@click.argument("model", metavar="[REF]", required=False, shell_complete=complete_model)
@draft_option("The trained head.")
@click.option("--tokens", type=click.IntRange(32), default=256, show_default=True, help="Length of the text.")
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout.")
@load_options
def probe_command(model: str | None, tokens: int, as_json: bool, **options: Any) -> None:
    """Find how a trained head of REF has to be read, and remember it.

    Compares the head's choices with the model's on a text, in each plausible reading of what its file says.
    """
    from edgespec.cli.engine import run_work
    from edgespec.cli.terminal import TerminalReporter
    from edgespec.service.head_probe import describe_useless, probe_head

    request = load_config(model, options)
    reporter = TerminalReporter()

    def work(check: CheckCancelled) -> Iterator[tuple[HeadSpec, ProbeResult]]:
        yield probe_head(request, tokens, reporter, check)

    ((stated, result),) = run_work(work)
    if as_json:
        click.echo(json.dumps(_describe_probe(result)))
        return
    for line in _format_probe(stated, result):
        click.echo(line)
    if result.is_useless:
        click.echo(describe_useless("the head", result) + " Loads refuse it.")


def _describe_probe(result: ProbeResult) -> dict[str, Any]:
    from edgespec.planner.head_readings import describe

    def row(trial: Trial) -> dict[str, Any]:
        return {"reading": describe(trial.spec), "agreement": trial.agreement, "positions": trial.positions}

    return {
        "readings": [row(each) for each in result.trials],
        "stated": row(result.stated) if result.stated else None,
        "chosen": row(result.chosen),
        "lookups": result.lookups,
        "own": result.own,
        "refused": result.is_useless,
        "seconds": round(result.seconds, 2),
    }


def _format_probe(stated: HeadSpec, result: ProbeResult) -> Iterator[str]:
    """A table: agreement at depths 1 and 2 of each reading, then what was chosen."""
    from edgespec.planner.head_readings import describe, describe_change

    whole = result.chosen.positions
    width = max(len(describe(each.spec)) for each in result.trials)
    yield f"{'reading':{width}}  depth 1  depth 2"
    for each in result.trials:
        if each.positions < whole:
            yield f"{describe(each.spec):{width}}  worse, given up after {each.positions} positions"
        else:
            yield f"{describe(each.spec):{width}}  {each.agreement[0]:7.0%}  {each.agreement[1]:7.0%}"
    yield f"{'lookups':{width}}  {result.lookups:7.0%}"
    change = describe_change(stated, result.chosen.spec)
    yield f"the head's {change}" if result.is_corrected else "the head is read as its file says"
    yield f"{whole} positions, {result.seconds:.1f} s"
