"""Several answers at once over one model: plain decoding, drafts of a fixed length, and the autopilot.

    uv run python -m benchmarks.parallel TARGET.gguf --draft DRAFT.gguf --tokens 48 --repeats 3 --plot parallel.svg

All answers of an arm share one llama.cpp context. What counts is the tokens that are emitted in the seconds between
the moment from which all of them decode and the moment at which the first of them ends, so that reading prompts and
stragglers are left out. Arms take turns, in another order at each repeat; the autopilot goes on with what it has
learned, as a server does. stdout ends with one JSON line.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import click

from benchmarks.machine import describe
from edgespec.backends import open_model
from edgespec.backends.options import LoadOptions
from edgespec.bench.prompt_sets import read_shipped_prompts
from edgespec.controller.stats import DraftStats
from edgespec.core.batching import Yield
from edgespec.core.protocols import Step
from edgespec.core.sampling import SamplingParams
from edgespec.engine.drafting import Speculation
from edgespec.engine.engine import Engine
from edgespec.engine.events import Event, Request

ARMS = {
    "plain": Speculation("none", 0),
    "ngram 3": Speculation("ngram", 3),
    "autopilot": Speculation("model"),
}
CATEGORIES = ("code_completion", "code_edit")  # what the trained pair knows
_MEASURED_S = 5.0


@dataclass
class Answer:
    """One under way: when it emitted how many tokens, and how many of its forwards had drafts."""

    events: Iterator[Event | Yield]
    emitted: list[tuple[float, int]] = field(default_factory=list)
    rounds: int = 0
    drafted: int = 0

    def go_on(self) -> bool:
        for event in self.events:
            if isinstance(event, Yield):
                return True
            if isinstance(event, Step):
                self.emitted.append((event.at_s, len(event.tokens)))
                self.rounds += 1
                self.drafted += event.n_drafted > 0
        return False


@click.command()
@click.argument("target", type=click.Path(exists=True, path_type=Path))
@click.option("--draft", type=click.Path(exists=True, path_type=Path), required=True)
@click.option("--at-once", default="1,2,4,8,16", show_default=True)
@click.option("--tokens", default=48, show_default=True)
@click.option("--temperature", default=0.0, show_default=True)
@click.option("--repeats", default=3, show_default=True)
@click.option("--threads", default=1, show_default=True)
@click.option("--ctx", default=512, show_default=True)
@click.option("--plot", type=click.Path(path_type=Path), help="An SVG of tokens/s by answers at once.")
def main(
    target: Path,
    draft: Path,
    max_concurrency: str,
    tokens: int,
    temperature: float,
    repeats: int,
    threads: int,
    ctx: int,
    plot: Path | None,
) -> None:
    loads = [int(n) for n in max_concurrency.split(",")]
    engine = _opened(target, draft, LoadOptions(threads=threads, context_size=ctx, caches=max(loads)))
    requests = _requests(engine, 16, tokens, temperature, ctx)
    rows = []
    for n in loads:
        speeds = _measured(engine, requests, n, repeats)
        rows.append({"at_once": n, **_row(speeds)})
        click.echo(json.dumps(rows[-1]))
    if plot:
        _plot(rows, plot)
    click.echo(json.dumps({"benchmark": "parallel", "rows": rows, "tokens": tokens, "temperature": temperature,
                           "threads": threads, **describe(target, draft)}))  # fmt: skip


def _opened(target: Path, draft: Path, options: LoadOptions) -> Engine:
    target_model, draft_model = (
        open_model("llamacpp", path, options, progress=lambda fraction: None, check=lambda: None)
        for path in (target, draft)
    )
    engine = Engine(target_model, draft_model, ARMS["autopilot"], options.caches)
    engine.draft_stats = DraftStats(engine.measure(_MEASURED_S))
    return engine


def _requests(engine: Engine, most: int, tokens: int, temperature: float, ctx: int) -> list[Request]:
    """Prompts of all categories in turn; no answer ends before it has `tokens`."""
    by_category = [[p.turns[0] for p in read_shipped_prompts([name])] for name in CATEGORIES]
    texts = [text for together in zip(*by_category, strict=False) for text in together]
    tokenizer = engine.target.tokenizer
    texts = [text for text in texts if len(tokenizer.encode(text, parse_special=False)) + tokens < ctx]
    ends = tuple((token, -100.0) for token in tokenizer.end_of_generation)
    sampling = SamplingParams(temperature=temperature, logit_bias=ends)
    return [Request(texts[i % len(texts)], sampling, tokens, seed=i) for i in range(most)]


def _measured(
    engine: Engine, requests: Sequence[Request], n: int, repeats: int
) -> dict[str, list[tuple[float, float]]]:
    """(tokens/s of all answers, share of rounds with drafts) of each arm, by repeat, of which the first is not counted.

    Each repeat has the next `n` of the requests.
    """
    found: dict[str, list[tuple[float, float]]] = {arm: [] for arm in ARMS}
    order = list(ARMS)
    for repeat in range(repeats + 1):
        random.Random(repeat).shuffle(order)
        for arm in order:
            chosen = [requests[(repeat * n + i) % len(requests)] for i in range(n)]
            measured = _run(engine, chosen, ARMS[arm])
            if repeat:
                found[arm].append(measured)
    return found


def _run(engine: Engine, requests: Sequence[Request], speculation: Speculation) -> tuple[float, float]:
    answers = [Answer(engine.generate(request, speculation=speculation)) for request in requests]
    running = answers
    end_s = 0.0
    while running:
        left = [answer for answer in running if answer.go_on()]
        if len(left) < len(running) and not end_s:
            end_s = perf_counter()
        running = left
    start_s = max(answer.emitted[0][0] for answer in answers)
    emitted = sum(n for answer in answers for at_s, n in answer.emitted if start_s < at_s <= end_s)
    rounds = sum(answer.rounds for answer in answers)
    return emitted / (end_s - start_s), sum(answer.drafted for answer in answers) / rounds


def _row(speeds: dict[str, list[tuple[float, float]]]) -> dict[str, Any]:
    """Medians of tokens/s, and of the ratios to the same repeat's others."""
    row: dict[str, Any] = {arm: round(median(s for s, _ in measured), 2) for arm, measured in speeds.items()}
    automatic = [s for s, _ in speeds["autopilot"]]
    for arm in list(row)[:-1]:
        ratios = [a / s for a, (s, _) in zip(automatic, speeds[arm], strict=True)]
        row[f"autopilot / {arm}"] = [round(r, 3) for r in (median(ratios), min(ratios), max(ratios))]
    row["rounds with drafts"] = round(median(share for _, share in speeds["autopilot"]), 3)
    return row


def _plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.add_subplot()
    loads = [row["at_once"] for row in rows]
    for arm, marker in zip(ARMS, "osD", strict=True):
        axes.plot(loads, [row[arm] for row in rows], marker=marker, label=arm)
    axes.set_xscale("log", base=2)
    axes.set_xticks(loads, [str(n) for n in loads])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("answers at once")
    axes.set_ylabel("tokens/s of all")
    axes.legend()
    FigureCanvasSVG(figure).print_svg(path)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
