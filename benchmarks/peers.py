"""edgespec beside what else decodes speculatively on this machine: same files, same prompts, one interleaved run.

    uv run python -m benchmarks.peers --target T.gguf --draft D.gguf [--llama-server PATH] [--tokens 96] [--repeats 3]

For GGUF files llama.cpp's `llama-server`, on PATH or where told: a process for each way to draft that its --help lists,
with its own default draft lengths; for MLX folders mlx_lm's generators. All get the same token ids (the first turn of a
prompt, without a template), threads and context. The arms of a prompt take turns, on the next repeat backwards, after a
warm-up on another text. Speed is measured alike for all, where tokens reach the reader: (tokens - 1) / time from the
first to the last; `own` is what the arm says of itself. "x plain" is the geometric mean, over prompts and repeats, of
the ratio to edgespec's plain decoding, "x own" to the same program's. tau is tokens a round, "same" how many greedy
outputs equal edgespec's first plain one, "from" the first token where one differs. The autopilot and ngram-mod learn
from one generation to the next: repeats are not cold. Arms that drafted nothing do what plain does: how far they are
from it is the machine's noise. stdout ends with one JSON line.
"""

from __future__ import annotations

import fnmatch
import json
import shutil
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import psutil

from benchmarks.machine import describe
from benchmarks.peers_arms import Arm, Generation, PeerFailed, Prompt, edgespec_arms, mlx_arms
from benchmarks.peers_server import LlamaServer, help_of, version_of, ways_to_draft
from edgespec.backends import BackendName, open_model
from edgespec.backends.options import LoadOptions, idle_cores
from edgespec.bench.prompt_sets import BenchPrompt, read_prompts, read_shipped_prompts, take_per_category
from edgespec.controller.stats import DraftStats
from edgespec.engine.drafting import Speculation
from edgespec.engine.engine import Engine
from edgespec.errors import ContextOverflow, EdgespecError

WARM_UP = "def mean(values: list[float]) -> float:\n    return sum(values) / len(values)\n\n\ndef median("
NO_PEER = (
    "no peer was found on this machine: install llama.cpp so that its llama-server is on PATH, or give the program's "
    "place with --llama-server PATH. (For a pair of MLX folders the peer is mlx-lm.)"
)
COLUMNS = ("tokens/s", "own", "x plain", "x own", "tau", "accepted", "same", "from")


@dataclass(frozen=True, slots=True)
class Run:
    arm: str
    prompt: Prompt
    repeat: int
    generation: Generation


@click.command()
@click.option("--target", required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--draft", type=click.Path(exists=True, path_type=Path))
@click.option("--llama-server", "server", default="llama-server", show_default=True, help="Name on PATH, or path.")
@click.option("--prompts", "own", type=click.Path(dir_okay=False, path_type=Path), help="JSONL of your own.")
@click.option("--category", "categories", multiple=True, help="Of the shipped prompts; repeatable. [default: all]")
@click.option("--per-category", type=click.IntRange(1), default=2, show_default=True)
@click.option("--tokens", type=click.IntRange(8), default=96, show_default=True)
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True)
@click.option("--threads", type=click.IntRange(1), help="[default: idle cores]")
@click.option("--ctx", type=click.IntRange(64), default=2048, show_default=True, help="Longer prompts are left out.")
@click.option("--temperature", type=click.FloatRange(0), default=0.0, show_default=True)
@click.option("--only", multiple=True, help="Of the peers, those called so (shell pattern); repeatable.")
def main(
    target: Path, draft: Path | None, server: str, own: Path | None, categories: tuple[str, ...], per_category: int,
    tokens: int, repeats: int, threads: int | None, ctx: int, temperature: float, only: tuple[str, ...],
) -> None:  # fmt: skip
    backend: BackendName = "mlx" if target.is_dir() else "llamacpp"
    binary = shutil.which(server)
    if backend == "llamacpp" and binary is None:
        raise click.ClickException(NO_PEER)
    threads = threads or idle_cores()
    with ExitStack() as undo:
        try:
            found = read_prompts(own) if own else read_shipped_prompts(categories or None)
            options = LoadOptions(context_size=ctx, threads=threads)
            models = [
                open_model(backend, path, options, progress=lambda _: None, check=lambda: None)
                for path in (target, draft)
                if path
            ]
            engine = Engine(models[0], models[1] if draft else None, Speculation("none", 0))
            undo.callback(engine.close)
            prompts = fitting(engine, take_per_category(found, per_category), tokens, ctx)
        except EdgespecError as error:
            raise click.ClickException(f"{error.message} {error.hint}") from error
        peers: list[Arm] = []
        if backend == "mlx":
            stop = models[0].tokenizer.end_of_generation
            peers += [arm for arm in mlx_arms(target, draft, stop) if wanted(arm.name, only)]
        elif binary is not None:
            peers += servers(binary, target, draft, ctx, threads, only, undo)
        if not peers:
            raise click.ClickException("no peer works; the lines above say why.")
        arms: list[Arm] = [*edgespec_arms(engine), *peers]
        warm_up(engine, arms, tokens, temperature)
        runs = list(interleaved(arms, prompts, tokens, repeats, temperature))
        idle = {arm.name: arm.idle_percent for arm in arms if isinstance(arm, LlamaServer)}
    rows = summarize(arms, runs, greedy=temperature == 0)
    click.echo(table(rows))
    result = {
        "benchmark": "peers", "threads": threads, "context": ctx, "tokens": tokens, "repeats": repeats,
        "temperature": temperature, "prompts": [prompt.id for prompt in prompts], "arms": rows,
        "llama_server": version_of(binary) if idle and binary else None, "idle_cpu_percent": idle,
        "runs": [record(run) for run in runs],
        **describe(*(path for path in (target, draft) if path)),
    }  # fmt: skip
    click.echo(json.dumps(result))


def fitting(engine: Engine, found: Sequence[BenchPrompt], tokens: int, context: int) -> list[Prompt]:
    prompts = []
    for prompt in found:
        try:
            ids = engine.encode(prompt.turns[0])
        except ContextOverflow:
            ids = []
        if ids and len(ids) + tokens < context:
            prompts.append(Prompt(prompt.id, prompt.category, prompt.turns[0], ids))
        else:
            click.echo(f"{prompt.id} is left out: too long for a context of {context}.", err=True)
    if not prompts:
        raise click.ClickException("no prompt fits into the context: give a larger --ctx.")
    return prompts


def wanted(name: str, only: Sequence[str]) -> bool:
    """A program's plain arm always is: the others are compared with it."""
    return not only or name.endswith(" plain") or any(fnmatch.fnmatch(name, f"*{pattern}") for pattern in only)


def servers(
    binary: str, target: Path, draft: Path | None, context: int, threads: int, only: Sequence[str], undo: ExitStack
) -> list[LlamaServer]:
    """A process for each way to draft that works and fits into memory; `undo` ends them."""
    help_text = help_of(binary)
    logs = Path(undo.enter_context(tempfile.TemporaryDirectory()))
    started = []
    for way, options in ways_to_draft(help_text, draft is not None).items():
        if not wanted(f"llama-server {way}", only):
            continue
        needed = target.stat().st_size + (draft.stat().st_size if draft else 0)  # weights are repacked, so not shared
        if psutil.virtual_memory().available < 1.2 * needed:
            click.echo(f"llama-server {way} is left out: not enough memory for one more.", err=True)
            continue
        try:
            arm = LlamaServer(binary, help_text, way, options, target, draft, context, threads, logs)
        except PeerFailed as error:
            click.echo(f"llama-server {way} is left out: {error}", err=True)
            continue
        undo.callback(arm.close)
        started.append(arm)
    return started


def warm_up(engine: Engine, arms: list[Arm], tokens: int, temperature: float) -> None:
    """One generation by each arm; those that fail leave `arms`. Then the autopilot's measurement, as at any start."""
    prompt = Prompt("warm-up", "", WARM_UP, engine.encode(WARM_UP))
    for arm in list(arms):
        try:
            arm.generate(prompt, tokens, temperature)
            if isinstance(arm, LlamaServer):
                arm.rest()
        except PeerFailed as error:
            click.echo(f"{arm.name} is left out: {error}", err=True)
            arms.remove(arm)
    engine.draft_stats = DraftStats(engine.measure(2.0))


def interleaved(
    arms: list[Arm], prompts: Sequence[Prompt], tokens: int, repeats: int, temperature: float
) -> Iterator[Run]:
    """All repeats of a prompt in a row, so that only the first has to read it; an arm that fails leaves `arms`."""
    for n, prompt in enumerate(prompts):
        for repeat in range(repeats):
            for arm in arms[:: 1 if repeat % 2 == 0 else -1]:
                try:
                    run = Run(arm.name, prompt, repeat, arm.generate(prompt, tokens, temperature))
                except PeerFailed as error:
                    click.echo(f"{arm.name} is left out from here: {error}", err=True)
                    arms.remove(arm)
                    continue
                yield run
        click.echo(f"prompt {n + 1}/{len(prompts)}", err=True)


def summarize(arms: Sequence[Arm], runs: Sequence[Run], *, greedy: bool) -> dict[str, dict[str, Any]]:
    """A row for each arm that stayed to the end."""
    speeds = {(run.arm, run.prompt.id, run.repeat): run.generation.tokens_per_second for run in runs}
    expected = {run.prompt.id: run.generation.tokens for run in reversed(runs) if run.arm == arms[0].name}

    def ratio(arm: str, to: str) -> float | None:
        pairs = [(speeds[key], speeds.get((to, *key[1:]))) for key in speeds if key[0] == arm]
        ratios = [a / b for a, b in pairs if a and b]
        return round(statistics.geometric_mean(ratios), 3) if ratios else None

    rows: dict[str, dict[str, Any]] = {}
    for arm in arms:
        mine = [run for run in runs if run.arm == arm.name]
        made = [run.generation for run in mine]
        drafted, rounds = sum(g.drafted for g in made), sum(g.rounds for g in made)
        common = [common_beginning(expected[run.prompt.id], run.generation.tokens) for run in mine]
        same = [common[i] == len(expected[run.prompt.id]) == len(made[i].tokens) for i, run in enumerate(mine)]
        rows[arm.name] = {
            "tokens/s": median([g.tokens_per_second for g in made]),
            "own": median([g.own.get("predicted_per_second", g.own.get("tokens_per_second")) for g in made]),
            "x plain": ratio(arm.name, arms[0].name),
            "x own": ratio(arm.name, arm.own_plain),
            "tau": round(sum(g.later for g in made) / rounds, 2) if rounds else None,
            "accepted": round(sum(g.accepted for g in made) / drafted, 2) if drafted else None,
            "same": f"{sum(same)}/{len(same)}" if greedy else None,
            "from": min((n for n, equal in zip(common, same, strict=True) if not equal), default=None)
            if greedy
            else None,
        }
    return rows


def median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value]
    return round(statistics.median(known), 2) if known else None


def common_beginning(expected: Sequence[int | None], found: Sequence[int | None]) -> int:
    """Tokens up to the first that differs; one that was not sent agrees with any."""
    pairs = zip(expected, found, strict=False)
    differs = (i for i, (a, b) in enumerate(pairs) if None not in (a, b) and a != b)
    return next(differs, min(len(expected), len(found)))


def table(rows: dict[str, dict[str, Any]]) -> str:
    cells: list[tuple[str, ...]] = [("arm", *COLUMNS)]
    cells += [(name, *("-" if row[key] is None else str(row[key]) for key in COLUMNS)) for name, row in rows.items()]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))])
        for line in cells
    )


def record(run: Run) -> dict[str, Any]:
    made = run.generation
    return {
        "arm": run.arm, "prompt": run.prompt.id, "category": run.prompt.category, "repeat": run.repeat,
        "emitted": len(made.tokens), "tokens_per_second": made.tokens_per_second, "rounds": made.rounds,
        "drafted": made.drafted, "accepted": made.accepted, "own": made.own,
    }  # fmt: skip


if __name__ == "__main__":
    main()
