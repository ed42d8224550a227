"""`edgespec recommend`: the models that suit this machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import click

from edgespec.cli.options import FloatRange, json_option, offer, open_hub, parse_backend
from edgespec.cli.output import format_groups, print_result, shorten
from edgespec.cli.terminal import report_activity
from edgespec.options import BACKEND
from edgespec.units import GIB

if TYPE_CHECKING:
    from edgespec.models.catalogue import Candidate, Recommendations
    from edgespec.models.registry import Task


TASKS = ("chat", "code", "reasoning")  # those of models.registry.Task, whose module takes long to import


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
    the draft model, at low and high acceptance, and is empty if the text decides what drafts gain. QUALITY follows
    from the number of parameters alone: toy, simple (from 1 billion), fair (3), good (7), strong (20), best (60).
    """
    from edgespec.backends import prefers_mlx
    from edgespec.cli.engine import run_work
    from edgespec.models.catalogue import Catalogue, Query
    from edgespec.models.fit import read_memory

    chosen = parse_backend(backend) or ("mlx" if prefers_mlx() else "llamacpp")
    assert chosen != "toy"
    query = Query(" ".join(words), task, None if max_size is None else int(max_size * GIB))
    registry, hub = open_hub()

    def work() -> Iterator[Recommendations]:
        catalogue = Catalogue(registry, hub, chosen, read_memory(chosen))
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
    from edgespec.models.catalogue import GROUPS

    if not models:
        yield "No model matches."
        return
    header = ("NAME", "QUALITY", "DOWNLOAD", "TOK/S", "DRAFTED", "LICENSE")
    titles: dict[str, str] = {group: f"\n{title}:" for group, title in GROUPS.items()}
    groups = [each.group for each in models]
    yield from format_groups([header, *map(_to_row, models)], ["", *groups], titles, frozenset({2, 3, 4}))
    yield ""


def _to_row(model: Candidate) -> tuple[str, ...]:
    from edgespec.models.catalogue import format_download, format_drafted, format_plain

    licensed = shorten(model.about.license or "?", 12) + (" (tight)" if model.fit == "tight" else "")
    speeds = format_plain(model), format_drafted(model)
    return model.name, model.quality, format_download(model), *speeds, licensed
