"""edgespec against llama-server over many settings: `benchmarks.peers` for each, one table and one plot.

    uv run python -m benchmarks.head_to_head --pair T.gguf D.gguf [--pair ...] --threads 1 --threads 4 \
        --temperature 0 --temperature 0.8 --prompt-tokens 500 --record runs.jsonl [--plot head_to_head.svg]

A cell is one file at one number of threads, temperature and prompt length. The bar of a cell is the best of
llama-server's modes there, chosen with hindsight by the geometric mean over the cell's prompts. "ratio" is the
geometric mean of the autopilot's tokens/s over that mode's, of the same prompt; the range holds the prompts' ratios.
No prompt is repeated: ngram-mod keeps the texts of earlier answers, so it would recite the answer of the first time.
A cell whose record is in the file of --record is not run again. stdout ends with one JSON line.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import click

from benchmarks.harness import MODEL_PATH, REPOSITORY, print_result

AUTOPILOT, PLAIN, PEER_PLAIN = "edgespec autopilot", "edgespec plain", "llama-server plain"
PEER = "llama-server "
CATEGORIES = ("code_completion", "code_edit", "chat", "rag")
ROOM = 64  # tokens of context beside prompt and answer
LONGEST_PROMPT = 1600  # tokens of the shipped prompts of CATEGORIES


@dataclass(frozen=True, slots=True)
class Cell:
    """One setting. `prompt_tokens` is the least length of a prompt."""

    target: str
    draft: str
    threads: int
    temperature: float
    prompt_tokens: int

    @property
    def label(self) -> str:
        """Short, for tables and plots."""
        return f"{Path(self.target).stem}, {self.threads}t, T {self.temperature:g}, {self.prompt_tokens:,}"


@dataclass(frozen=True, slots=True)
class Result:
    """The figures of a cell: ratios of tokens/s, geometric means over prompts.

    best      llama-server's best mode
    ratio     the autopilot over that mode; `low` and `high` are the extremes of its prompts
    plain     edgespec's plain decoding over llama-server's
    x_plain   the autopilot over edgespec's plain decoding
    """

    label: str
    best: str
    ratio: float
    low: float
    high: float
    plain: float
    x_plain: float
    tokens_per_second: float


@click.command()
@click.option("--pair", "pairs", required=True, multiple=True, nargs=2, type=MODEL_PATH, help="Target and draft.")
@click.option("--llama-server", "server", default="llama-server", show_default=True, help="Name on PATH, or path.")
@click.option("--threads", type=click.IntRange(1), multiple=True, default=(1,), show_default=True)
@click.option("--temperature", "temperatures", type=click.FloatRange(0), multiple=True, default=(0.0,))
@click.option("--prompt-tokens", "lengths", type=click.IntRange(1), multiple=True, default=(500,), show_default=True)
@click.option("--category", "categories", multiple=True, default=CATEGORIES, show_default=True)
@click.option("--per-category", type=click.IntRange(1), default=2, show_default=True)
@click.option("--tokens", type=click.IntRange(8), default=96, show_default=True)
@click.option("--mode", "modes", multiple=True, help="As --only of peers.  [default: draft, ngram-mod and both]")
@click.option("--record", type=click.Path(dir_okay=False, path_type=Path), required=True, help="JSONL file of cells.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Write an SVG of the ratios.")
def main(
    pairs: Sequence[tuple[Path, Path]],
    server: str,
    threads: Sequence[int],
    temperatures: Sequence[float],
    lengths: Sequence[int],
    categories: Sequence[str],
    per_category: int,
    tokens: int,
    modes: Sequence[str],
    record: Path,
    plot: Path | None,
) -> None:
    """Compare edgespec's autopilot with llama-server's best mode in every cell."""
    common = ["--llama-server", server, "--per-category", per_category, "--tokens", tokens, "--repeats", 1]
    common += [word for name in categories for word in ("--category", name)]
    common += [word for name in modes or ("draft", "ngram-mod") for word in ("--only", name)]
    known = read_record(record)
    results = []
    for pair, n, temperature, length in itertools.product(pairs, threads, temperatures, lengths):
        cell = Cell(str(pair[0].resolve()), str(pair[1].resolve()), n, temperature, length)
        runs = known.get(cell)
        if runs is None:
            runs = run_cell(cell, [*common, "--ctx", max(length, LONGEST_PROMPT) + tokens + ROOM])
            with record.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"cell": asdict(cell), "runs": runs}) + "\n")
        results.append(summarize(cell, runs))
        click.echo(format_row(results[-1]), err=True)
    if plot:
        draw_plot(results, plot)
    overall = round(geometric_mean(result.ratio for result in results), 3)
    click.echo(f"geometric mean of {len(results)} cells: {overall}", err=True)
    files = {path: None for pair in pairs for path in pair}
    print_result("head_to_head", {"overall": overall, "cells": [asdict(each) for each in results]}, *files)


def read_record(path: Path) -> dict[Cell, list[dict[str, Any]]]:
    """The runs of each recorded cell."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    records = [json.loads(line) for line in lines]
    return {Cell(**each["cell"]): each["runs"] for each in records}


def run_cell(cell: Cell, options: Sequence[object]) -> list[dict[str, Any]]:
    """The runs that `benchmarks.peers` reports. Raises click.ClickException where it fails."""
    command = [sys.executable, "-m", "benchmarks.peers", "--target", cell.target, "--draft", cell.draft]
    command += ["--threads", str(cell.threads), "--temperature", str(cell.temperature)]
    command += ["--prompt-tokens", str(cell.prompt_tokens), *map(str, options)]
    done = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise click.ClickException(f"{cell.label} failed; the lines above say why.")
    runs: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])["runs"]
    if PEER_PLAIN not in {run["arm"] for run in runs}:
        raise click.ClickException(f"{cell.label}: llama-server finished no prompt; the lines above say why.")
    return runs


def summarize(cell: Cell, runs: Sequence[Mapping[str, Any]]) -> Result:
    speeds: dict[str, dict[str, float]] = {}
    for run in runs:
        if run["tokens_per_second"]:
            speeds.setdefault(run["arm"], {})[run["prompt"]] = run["tokens_per_second"]

    def ratios(arm: str, other: str) -> dict[str, float]:
        return {key: speed / speeds[other][key] for key, speed in speeds[arm].items() if key in speeds[other]}

    def mean(arm: str, other: str) -> float:
        return geometric_mean(ratios(arm, other).values())

    best = max((arm for arm in speeds if arm.startswith(PEER)), key=lambda arm: mean(arm, PLAIN))
    found = ratios(AUTOPILOT, best)
    return Result(
        cell.label,
        best.removeprefix(PEER),
        round(mean(AUTOPILOT, best), 3),
        round(min(found.values()), 3),
        round(max(found.values()), 3),
        round(mean(PLAIN, PEER_PLAIN), 3),
        round(mean(AUTOPILOT, PLAIN), 3),
        round(geometric_mean(speeds[AUTOPILOT].values()), 2),
    )


def format_row(result: Result) -> str:
    """A row of a Markdown table: cell, tokens/s, x plain, plain / plain, llama-server's best mode, ratio (extremes)."""
    span = f"{result.ratio:.2f} ({result.low:.2f} to {result.high:.2f})"
    speeds = f"{result.tokens_per_second:.1f} | {result.x_plain:.2f} | {result.plain:.2f}"
    return f"| {result.label} | {speeds} | {result.best} | {span} |"


def draw_plot(results: Sequence[Result], path: Path) -> None:
    """A row for each cell: the ratio as a dot, the extremes of its prompts as a line."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 1.2 + 0.26 * len(results)), layout="constrained")
    axes = figure.add_subplot()
    rows = range(len(results))
    axes.hlines(rows, [each.low for each in results], [each.high for each in results], color="tab:gray")
    axes.plot([each.ratio for each in results], rows, "o", color="tab:blue")
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_yticks(rows, [f"{each.label}: {each.best}" for each in results])
    axes.invert_yaxis()
    axes.set_xlabel("edgespec's autopilot over llama-server's best mode, tokens/s")
    with rc_context({"svg.hashsalt": "edgespec", "svg.fonttype": "none"}):
        FigureCanvasSVG(figure).print_svg(path, metadata={"Date": None})  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
