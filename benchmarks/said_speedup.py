"""The speedup that the chat and `edgespec run` state for an answer against the measured one.

    uv run python -m benchmarks.said_speedup [--model REF] [--by chat] [--answers 30] [--tokens 96] [--busy 0]

Each prompt is answered greedily with and without drafts in the order plain, drafts, drafts, plain, and twice as often
with `--repeats 2`. The measured speedup is the tokens/s of the answers with drafts over that of the plain ones, after
their first token; the stated one is the mean over the answers with drafts. `--by chat` reads the statistics of the chat
beside an engine process, `--by run` the JSON of new processes. `--busy N` keeps N processes computing beside it.
`--record FILE` keeps the rounds of the answers with drafts. stdout ends with one JSON line.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import Any

import click

from benchmarks.harness import EDGESPEC, PLAIN, print_result
from edgespec.backends.options import LoadOptions
from edgespec.bench.prompt_sets import read_shipped_prompts
from edgespec.cli.terminal import TerminalReporter
from edgespec.client.process import EngineProcess
from edgespec.core.metrics import Meter
from edgespec.core.protocols import Step
from edgespec.core.sampling import SamplingParams
from edgespec.engine.events import Request
from edgespec.models.load_config import LoadConfig
from edgespec.text.chat_template import Message

GREEDY = SamplingParams(temperature=0.0)
Rounds = list[tuple[int, int, int, int, float | None]]
"""Drafted and emitted tokens, microseconds since the round before, those of drafting, plain steps of the forward."""


@dataclass(frozen=True)
class Answer:
    """`bound` is tau times the share of the time that is not drafting; `rounds` are known in the chat alone."""

    seconds_a_token: float
    stated: float | None
    bound: float
    rounds: Rounds = field(default_factory=list)


Ask = Callable[[str, bool], Answer | None]
"""Answers a prompt with drafts or without; None for an answer of one token, of which nothing is stated."""


@click.command()
@click.option("--model", help="As for `edgespec run`.")
@click.option("--by", type=click.Choice(["chat", "run"]), default="chat", show_default=True)
@click.option("--answers", type=click.IntRange(1), default=30, show_default=True)
@click.option("--tokens", type=click.IntRange(8), default=96, show_default=True)
@click.option("--repeats", type=click.IntRange(1), default=1, show_default=True)
@click.option("--busy", type=click.IntRange(0), default=0, show_default=True)
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True)
@click.option("--record", type=click.Path(dir_okay=False, path_type=Path))
def main(
    model: str | None, by: str, answers: int, tokens: int, repeats: int, busy: int, threads: int, record: Path | None
) -> None:
    """Compare what is stated of each answer with what is measured."""
    rows: list[dict[str, float]] = []
    kept: list[dict[str, Any]] = []
    with ExitStack() as stack:
        opened = open_chat(model, tokens, threads, stack) if by == "chat" else open_run(model, tokens, threads)
        stack.enter_context(keep_busy(busy))
        for prompt in islice((each.turns[0] for each in read_shipped_prompts()), answers):
            if found := compare(opened, prompt, repeats):
                row, rounds = found
                rows.append(row)
                kept += [{"measured": row["measured"], "rounds": each} for each in rounds]
                click.echo(f"{len(rows):3} stated {row['stated']:.3f}, measured {row['measured']:.3f}", err=True)
    if record is not None:
        record.write_text(json.dumps(kept), encoding="utf-8")
    errors = sorted(abs(row["stated"] / row["measured"] - 1) for row in rows)
    summary = {
        "median_error": median(errors),
        "worst_error": errors[-1],
        "within_5_percent": sum(each <= 0.05 for each in errors),
        "within_10_percent": sum(each <= 0.1 for each in errors),
        "error_of_the_mean": fmean(r["stated"] for r in rows) / fmean(r["measured"] for r in rows) - 1,
        "beyond_the_bound": sum(row["stated"] > row["bound"] * 1.001 for row in rows),
    }
    settings = {"by": by, "busy": busy, "threads": threads, "tokens": tokens, "repeats": repeats, "model": model}
    print_result("said_speedup", {**settings, "answers": len(rows), **summary, "rows": rows})


def compare(ask: Ask, prompt: str, repeats: int) -> tuple[dict[str, float], list[Rounds]] | None:
    """Stated and measured speedup of one prompt, and the rounds with drafts; None where nothing is stated."""
    found: dict[bool, list[Answer]] = {False: [], True: []}
    for drafts in (False, True, True, False) * repeats:
        if (answer := ask(prompt, drafts)) is None:
            return None
        found[drafts].append(answer)
    stated = [each.stated for each in found[True] if each.stated is not None]
    if not stated:
        return None
    plain_s, drafted_s = (fmean(each.seconds_a_token for each in found[drafts]) for drafts in (False, True))
    bound = fmean(each.bound for each in found[True])
    row = {"stated": fmean(stated), "bound": bound, "measured": plain_s / drafted_s}
    return row, [each.rounds for each in found[True]]


def open_chat(model: str | None, tokens: int, threads: int, stack: ExitStack) -> Ask:
    """Answers of an engine process, by the statistics that the chat shows."""
    client = EngineProcess()
    stack.callback(client.close)
    list(client.open(LoadConfig(model, load=LoadOptions(threads=threads)), TerminalReporter()))

    def ask(prompt: str, drafts: bool) -> Answer | None:
        request = Request((Message("user", prompt),), GREEDY, tokens)
        meter = Meter(0, perf_counter())
        for event in client.stream(request, None if drafts else PLAIN):
            if isinstance(event, Step):
                meter.add(event)
        metrics = meter.metrics()
        if metrics.tpot_s is None or metrics.tau is None:
            return None
        at_s, rounds = meter.steps[0].at_s, Rounds()
        for each in meter.steps[1:]:
            spent_us, drafting_us = round(1e6 * (each.at_s - at_s)), round(1e6 * each.draft_s)
            rounds.append((each.n_drafted, len(each.tokens), spent_us, drafting_us, each.plain_steps))
            at_s = each.at_s
        share = sum(each[3] for each in rounds) / sum(each[2] for each in rounds)
        return Answer(metrics.tpot_s, metrics.speedup, metrics.tau * (1 - share), rounds)

    return ask


def open_run(model: str | None, tokens: int, threads: int) -> Ask:
    """Answers of `edgespec run --json`, each in a new process."""
    options = ["--max-tokens", str(tokens), "--temperature", "0", "--threads", str(threads), "--json"]
    options += ["--model", model] if model else []

    def ask(prompt: str, drafts: bool) -> Answer | None:
        command = [*EDGESPEC, "run", prompt, *options, *([] if drafts else ["--draft", "none"])]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if done.returncode:
            raise click.ClickException(done.stderr)
        metrics = json.loads(done.stdout)["metrics"]
        if metrics["tpot_s"] is None:
            return None
        share = metrics["draft_s"] / (metrics["tpot_s"] * (metrics["emitted_tokens"] - 1))
        return Answer(metrics["tpot_s"], metrics["speedup"], metrics["tau"] * (1 - share))

    return ask


@contextmanager
def keep_busy(n: int) -> Iterator[None]:
    """Runs `n` processes that compute without end."""
    children = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(n)]
    try:
        yield
    finally:
        for child in children:
            child.kill()
            child.wait()


if __name__ == "__main__":
    main()
