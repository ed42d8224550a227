"""`edgespec recommend`: the models that suit this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import click

from edgespec.cli.options import backend_option, parse_backend

if TYPE_CHECKING:
    from edgespec.core.protocols import CheckCancelled
    from edgespec.planner.recommend import Recommendation, Recommendations

_GIB = 2**30


@click.command("recommend")
@click.argument("words", nargs=-1, metavar="[TEXT]...")
@click.option(
    "--for",
    "use",
    type=click.Choice(["chat", "code", "agents", "documents", "reasoning"]),
    help="What the model is for; says which drafter suits it.",
)
@click.option(
    "--max-size", type=click.FloatRange(0, min_open=True), metavar="GIB", help="Maximum size of the download."
)
@backend_option("Runtime that is to run the models.")
@click.option("--again", is_flag=True, help="Measure this machine again, such as when it was busy the first time.")
@click.option("--no-speed", is_flag=True, help="Skip the measurement, which takes some seconds once.")
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout.")
def recommend_command(
    words: tuple[str, ...],
    use: str | None,
    max_size: float | None,
    backend: str,
    again: bool,
    no_speed: bool,
    as_json: bool,
) -> None:
    """List models for this machine: those of the registry, and with TEXT or --for those of a search of the hub.

    Only headers are read. The order: models that fit in the free memory at 20 tokens/s or more (50 ms a token), the
    largest first; slower ones, the fastest first; those whose speed is not known; those that do not fit.

    Speeds are extrapolated from a measurement of this machine with weights of each type; DRAFTED is the range with
    the draft model, at low and high acceptance. QUALITY follows from the number of parameters alone: toy, simple (from
    1 billion), fair (3), good (7), strong (20), best (60).
    """
    from edgespec.backends import prefers_mlx
    from edgespec.cli.engine import run_work
    from edgespec.cli.terminal import report_activity
    from edgespec.hub.hub import Hub
    from edgespec.planner.candidates import Query
    from edgespec.planner.memory import read_memory
    from edgespec.planner.recommend import DRAFTERS, TASKS, Recommender
    from edgespec.registry.schema import load_registry

    chosen = parse_backend(backend) or ("mlx" if prefers_mlx() else "llamacpp")
    assert chosen != "toy"
    task = TASKS[use] if use else None  # type: ignore[index]
    query = Query(" ".join(words), task, None if max_size is None else int(max_size * _GIB))
    registry, hub = load_registry(), Hub.from_environment()

    def work(check: CheckCancelled) -> Iterator[Recommendations]:
        recommender = Recommender(registry, hub, chosen, read_memory(chosen), report_activity, check, again)
        yield recommender.recommend(query, measure=not no_speed)

    (found,) = run_work(work)
    report_activity("")
    if as_json:
        models = [each.to_dict() for each in found.models]
        types = {name: round(cost, 2) for name, cost in found.speed.compare_types().items()}
        result = {"models": models, "notices": list(found.notices), "advice": found.advice, "weight_cost": types}
        click.echo(json.dumps(result, ensure_ascii=False))
        return
    for notice in found.notices:
        click.echo(f"note: {notice}", err=True)
    if not found.models:
        click.echo("No model matches.")
        return
    click.echo("\n".join(_format(found.models)))
    if costs := found.speed.compare_types():
        told = ", ".join(f"{name} {cost:.1f}" for name, cost in costs.items())
        click.echo(f"Time of a weight on this machine, by type: {told}.", err=True)
    for advice in found.advice:
        click.echo(advice, err=True)
    if use is not None:
        click.echo(f"Drafts for {use}: {DRAFTERS[use]}.", err=True)  # type: ignore[index]
    click.echo("`edgespec plan NAME` measures one of them, `edgespec chat NAME` downloads and opens it.", err=True)


def _format(models: Sequence[Recommendation]) -> Iterator[str]:
    from edgespec.cli.table import format_table
    from edgespec.planner.recommend import GROUPS

    header = ("NAME", "QUALITY", "DOWNLOAD", "TOK/S", "DRAFTED", "LICENSE")
    lines = list(format_table([header, *(_to_row(each) for each in models)], frozenset({2, 3, 4})))
    yield lines[0]
    shown = ""
    for line, model in zip(lines[1:], models, strict=True):
        if model.group != shown:
            shown = model.group
            yield f"\n{GROUPS[model.group]}:"
        yield line
    yield ""


def _to_row(model: Recommendation) -> tuple[str, ...]:
    from edgespec.cli.table import shorten
    from edgespec.planner.recommend import format_download, format_drafted, format_plain

    licensed = shorten(model.candidate.about.license or "?", 12) + (" (tight)" if model.fit == "tight" else "")
    speeds = format_plain(model), format_drafted(model)
    return model.candidate.name, model.quality, format_download(model), *speeds, licensed
