"""The speedup that the chat and `edgespec run` state for an answer against the measured one.

    uv run python -m benchmarks.said_speedup [--model REF] [--by chat] [--answers 30] [--tokens 96] [--busy 0]

Each prompt is answered greedily with and without drafts in the order plain, drafts, drafts, plain, and twice as often
with `--repeats 2`. The measured speedup is the tokens/s of the answers with drafts over that of the plain ones, after
their first token; the stated one is the mean over the answers with drafts. `--by chat` reads the statistics of the chat
beside an engine process, `--by run` the JSON of new processes. `--busy N` keeps N processes computing beside it. stdout
ends with one JSON line.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from statistics import fmean, median
from time import perf_counter

import click

from benchmarks.harness import EDGESPEC, PLAIN, print_result
from edgespec.backends.options import LoadOptions
from edgespec.bench.prompt_sets import read_shipped_prompts
from edgespec.cli.terminal import TerminalReporter
from edgespec.core.protocols import Step
from edgespec.core.sampling import SamplingParams
from edgespec.engine.events import Request
from edgespec.planner.plan import LoadConfig
from edgespec.service.process import EngineProcess
from edgespec.text.chat_template import Message
from edgespec.tui.live_stats import LiveStats

GREEDY = SamplingParams(temperature=0.0)
Answer = tuple[float, float | None, float | None]
"""Seconds a token after the first, the stated speedup, and its bound: tau times the share that is not drafting."""
Ask = Callable[[str, bool], Answer | None]


@click.command()
@click.option("--model", help="As for `edgespec run`.")
@click.option("--by", type=click.Choice(["chat", "run"]), default="chat", show_default=True)
@click.option("--answers", type=click.IntRange(1), default=30, show_default=True)
@click.option("--tokens", type=click.IntRange(8), default=96, show_default=True)
@click.option("--repeats", type=click.IntRange(1), default=1, show_default=True)
@click.option("--busy", type=click.IntRange(0), default=0, show_default=True)
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True)
def main(model: str | None, by: str, answers: int, tokens: int, repeats: int, busy: int, threads: int) -> None:
    """Compare what is stated of each answer with what is measured."""
    rows: list[dict[str, float]] = []
    with ExitStack() as stack:
        opened = open_chat(model, tokens, threads, stack) if by == "chat" else open_run(model, tokens, threads)
        stack.enter_context(keep_busy(busy))
        for prompt in islice((each.turns[0] for each in read_shipped_prompts()), answers):
            if row := compare(opened, prompt, repeats):
                rows.append(row)
                click.echo(f"{len(rows):3} stated {row['stated']:.3f}, measured {row['measured']:.3f}", err=True)
    errors = sorted(abs(row["stated"] / row["measured"] - 1) for row in rows)
    summary = {
        "median_error": median(errors),
        "worst_error": errors[-1],
        "within_5_percent": sum(each <= 0.05 for each in errors),
        "within_10_percent": sum(each <= 0.1 for each in errors),
        "error_of_the_mean": fmean(r["stated"] for r in rows) / fmean(r["measured"] for r in rows) - 1,
        "beyond_the_bound": sum(row["stated"] > row["bound"] * (1 + 1e-9) for row in rows),
    }
    settings = {"by": by, "busy": busy, "threads": threads, "tokens": tokens, "repeats": repeats, "model": model}
    print_result("said_speedup", {**settings, "answers": len(rows), **summary, "rows": rows})


def compare(ask: Ask, prompt: str, repeats: int) -> dict[str, float] | None:
    """Stated and measured speedup of one prompt; None for an answer of one token, of which nothing is stated."""
    found: dict[bool, list[Answer]] = {False: [], True: []}
    for drafts in (False, True, True, False) * repeats:
        if (answer := ask(prompt, drafts)) is None:
            return None
        found[drafts].append(answer)
    stated = [(said, bound) for _, said, bound in found[True] if said is not None and bound is not None]
    if not stated:
        return None
    measured = fmean(each[0] for each in found[False]) / fmean(each[0] for each in found[True])
    return {"stated": fmean(s for s, _ in stated), "bound": fmean(b for _, b in stated), "measured": measured}


def open_chat(model: str | None, tokens: int, threads: int, stack: ExitStack) -> Ask:
    """Answers of an engine process, by the statistics that the chat shows."""
    client = EngineProcess()
    stack.callback(client.close)
    list(client.open(LoadConfig(model, load=LoadOptions(threads=threads)), TerminalReporter()))

    def ask(prompt: str, drafts: bool) -> Answer | None:
        request = Request((Message("user", prompt),), GREEDY, tokens)
        stats = LiveStats(requested_s=perf_counter())
        for event in client.stream(request, None if drafts else PLAIN):
            if isinstance(event, Step):
                stats.add(event)
        if stats.mean_speed is None or stats.tau is None:
            return None
        steps = list(stats.steps)
        share = sum(each.draft_s for each in steps) / (steps[-1].at_s - (stats.first_token_s or 0.0))
        return 1 / stats.mean_speed, stats.times_plain, stats.tau * (1 - share)

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
        return metrics["tpot_s"], metrics["times_plain"], metrics["tau"] * (1 - share)

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
