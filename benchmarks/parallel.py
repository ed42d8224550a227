"""Concurrent answers on one model: plain decoding, drafts of a fixed length, and the autopilot.

    uv run python -m benchmarks.parallel TARGET.gguf --draft DRAFT.gguf --tokens 48 --repeats 3 --plot parallel.svg

All answers of an arm share one llama.cpp context. Speed counts the tokens emitted between the moment when all answers
decode and the moment when the first one ends, so it leaves out prefill and stragglers. The order of the arms changes
with each repeat; the autopilot keeps what it learns, as in a server. stdout ends with one JSON line.
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

from benchmarks.harness import DRAFT, MODEL_PATH, PLAIN, TARGET, list_loaded, load_model, print_result
from edgespec.autopilot.speculation import Speculation
from edgespec.autopilot.stats import DraftStats
from edgespec.backends.options import LoadOptions
from edgespec.bench.prompt_sets import read_shipped_prompts
from edgespec.core.peers import Yield
from edgespec.core.protocols import Step
from edgespec.core.sampling import SamplingParams
from edgespec.engine.engine import Engine
from edgespec.engine.events import Event, Request

ARMS = {"plain": PLAIN, "ngram 3": Speculation(("ngram",), 3), "autopilot": Speculation(("ngram", "model"))}
CATEGORIES = ("code_completion", "code_edit")  # the trained pair's domain
N_REQUESTS = 16
PROFILE_S = 5.0  # spent on measuring the models' costs


@dataclass
class Answer:
    """One answer in progress: (time, tokens) of each emission, rounds, and rounds with drafts."""

    events: Iterator[Event | Yield]
    emissions: list[tuple[float, int]] = field(default_factory=list)
    rounds: int = 0
    drafted: int = 0

    def advance(self) -> bool:
        """Run to the next Yield; False at the end."""
        for event in self.events:
            if isinstance(event, Yield):
                return True
            if isinstance(event, Step):
                self.emissions.append((event.at_s, len(event.tokens)))
                self.rounds += 1
                self.drafted += event.n_drafted > 0
        return False


@click.command()
@click.argument("target", type=MODEL_PATH, default=TARGET)
@click.option("--draft", type=MODEL_PATH, default=DRAFT)
@click.option(
    "--max-concurrency", "--at-once", "loads", default="1,2,4,8,16", show_default=True, help="Numbers of answers."
)
@click.option("--tokens", type=click.IntRange(2), default=48, show_default=True)
@click.option("--temperature", default=0.0, show_default=True)
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True)
@click.option("--threads", default=1, show_default=True)
@click.option("--ctx", default=512, show_default=True)
@click.option("--plot", type=click.Path(path_type=Path), help="Write an SVG of tokens/s by concurrent answers.")
def main(
    target: Path,
    draft: Path,
    loads: str,
    tokens: int,
    temperature: float,
    repeats: int,
    threads: int,
    ctx: int,
    plot: Path | None,
) -> None:
    """Measure the GGUF file TARGET with each number of answers."""
    counts = [int(n) for n in loads.split(",")]
    options = LoadOptions(threads=threads, context_size=ctx, caches=max(counts))
    models = [load_model("llamacpp", path, options) for path in (target, draft)]
    engine = Engine(models[0], list_loaded(model=models[1]), ARMS["autopilot"], options.caches)
    engine.draft_stats = DraftStats(engine.measure(PROFILE_S))
    requests = make_requests(engine, tokens, temperature, ctx)
    rows = []
    for n in counts:
        rows.append({"at_once": n, **summarize(measure_arms(engine, requests, n, repeats))})
        click.echo(json.dumps(rows[-1]), err=True)
    engine.close()
    if plot:
        draw_plot(rows, plot)
    settings = {"tokens": tokens, "temperature": temperature, "threads": threads}
    print_result("parallel", {"rows": rows, **settings}, target, draft)


def make_requests(engine: Engine, tokens: int, temperature: float, ctx: int) -> list[Request]:
    """[N_REQUESTS] prompts of the categories in turn; end-of-generation tokens are suppressed, so all have `tokens`."""
    by_category = [[p.turns[0] for p in read_shipped_prompts([name])] for name in CATEGORIES]
    texts = [text for group in zip(*by_category, strict=False) for text in group]
    tokenizer = engine.target.tokenizer
    texts = [text for text in texts if len(tokenizer.encode(text, parse_special=False)) + tokens < ctx]
    bias = tuple((token, -100.0) for token in tokenizer.end_of_generation)
    sampling = SamplingParams(temperature=temperature, logit_bias=bias)
    return [Request(texts[i % len(texts)], sampling, tokens, seed=i) for i in range(N_REQUESTS)]


def measure_arms(
    engine: Engine, requests: Sequence[Request], n: int, repeats: int
) -> dict[str, list[tuple[float, float]]]:
    """[repeats] (tokens/s of all answers, share of rounds with drafts) of each arm, after a warm-up.

    Each repeat takes the next `n` requests.
    """
    results: dict[str, list[tuple[float, float]]] = {arm: [] for arm in ARMS}
    order = list(ARMS)
    for repeat in range(repeats + 1):
        random.Random(repeat).shuffle(order)
        for arm in order:
            batch = [requests[(repeat * n + i) % len(requests)] for i in range(n)]
            result = run_batch(engine, batch, ARMS[arm])
            if repeat:
                results[arm].append(result)
    return results


def run_batch(engine: Engine, requests: Sequence[Request], speculation: Speculation) -> tuple[float, float]:
    """Run all requests together; (tokens/s while all decode, share of rounds with drafts)."""
    answers = [Answer(engine.generate(request, speculation=speculation)) for request in requests]
    running = answers
    end_s = 0.0
    while running:
        still_running = [answer for answer in running if answer.advance()]
        if len(still_running) < len(running) and not end_s:
            end_s = perf_counter()
        running = still_running
    start_s = max(answer.emissions[0][0] for answer in answers)
    if end_s <= start_s:
        raise click.ClickException("an answer had ended before all prompts were read; give more --tokens.")
    emitted = sum(n for answer in answers for at_s, n in answer.emissions if start_s < at_s <= end_s)
    rounds = sum(answer.rounds for answer in answers)
    return emitted / (end_s - start_s), sum(answer.drafted for answer in answers) / rounds


def summarize(results: dict[str, list[tuple[float, float]]]) -> dict[str, Any]:
    """Median tokens/s of each arm; the autopilot's ratio to each other arm as [median, minimum, maximum]."""
    row: dict[str, Any] = {arm: round(median(speed for speed, _ in each), 2) for arm, each in results.items()}
    speeds = [speed for speed, _ in results["autopilot"]]
    for arm in list(row)[:-1]:
        ratios = [a / b for a, (b, _) in zip(speeds, results[arm], strict=True)]
        row[f"autopilot / {arm}"] = [round(r, 3) for r in (median(ratios), min(ratios), max(ratios))]
    row["rounds with drafts"] = round(median(share for _, share in results["autopilot"]), 3)
    return row


def draw_plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """An SVG: tokens/s of each arm, by the number of answers."""
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
    axes.set_xlabel("concurrent answers")
    axes.set_ylabel("tokens/s in total")
    axes.legend()
    FigureCanvasSVG(figure).print_svg(path)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
