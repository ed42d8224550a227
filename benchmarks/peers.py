"""edgespec compared with other programs that decode speculatively: the same files and prompts in one interleaved run.

    uv run python -m benchmarks.peers --target T.gguf --draft D.gguf [--llama-server PATH] [--tokens 96] [--repeats 3]

For GGUF files the peer is llama.cpp's `llama-server`: one process for each draft mode that its --help lists, with its
own default draft lengths. The draft is a model or a trained head. For MLX folders the peer is mlx_lm. All get the same
token ids (the first turn of a prompt, without a template), threads and context. edgespec is an engine process, as the
chat and the server run it, and measures its settings and costs on load. After a warm-up on another text the arms of a
prompt take turns, in reverse order on every second repeat. The autopilot's memory and ngram-mod keep what was answered,
so repeats are not cold. With --warm N every arm first answers the first N prompts of each category, which are not
measured. The category agent_turns is not shipped: a file of 300 lines and a request, after each of five edits. All of
its turns are run, whatever --per-category is.

Columns: tokens/s is (tokens - 1) / time from the first token to the last, as the reader of the stream sees them; with
--processor-time by the program's processor time, which others disturb less; "own" is the program's own figure. "x
plain" is the geometric mean, over prompts and repeats, of the ratio to edgespec's plain decoding; "x own" the ratio to
the same program's plain arm. tau is tokens a round. "same" counts the greedy outputs that equal edgespec's first plain
one; "from" is the first token where one differs. An arm that drafted nothing shows the machine's noise. stdout ends
with one JSON line.
"""

from __future__ import annotations

import fnmatch
import shutil
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import psutil

from benchmarks.harness import MODEL_PATH, PLAIN, list_loaded, load_model, print_result
from benchmarks.peers_arms import LOOKUPS, Arm, Edgespec, Generation, PeerFailed, Prompt, mlx_arms, open_edgespec
from benchmarks.peers_categories import compare_by_category, format_ratio
from benchmarks.peers_prompts import read_candidates, select_prompts, split_warm, take_candidates
from benchmarks.peers_server import LlamaServer, list_draft_modes, read_help, read_version
from edgespec.backends import BackendName
from edgespec.backends.options import LoadOptions, idle_cores
from edgespec.bench.prompt_sets import read_prompts
from edgespec.engine.drafting import Speculation
from edgespec.engine.engine import Engine
from edgespec.engine.events import MemoryUse
from edgespec.errors import EdgespecError
from edgespec.formats.head_file import read_head

AUTOPILOT = "edgespec autopilot"
WARM_UP = "def mean(values: list[float]) -> float:\n    return sum(values) / len(values)\n\n\ndef median("
MEMORY_MARGIN = 1.2  # over the size of the weights that a server repacks
NO_PEER = "llama-server was not found: install llama.cpp, or name the program with --llama-server PATH."
COLUMNS = ("tokens/s", "own", "x plain", "x own", "tau", "accepted", "same", "from")


@dataclass(frozen=True, slots=True)
class Run:
    """One generation of one arm."""

    arm: str
    prompt: Prompt
    repeat: int
    generation: Generation


@click.command()
@click.option("--target", required=True, type=MODEL_PATH)
@click.option("--draft", type=MODEL_PATH)
@click.option("--llama-server", "server", default="llama-server", show_default=True, help="Name on PATH, or path.")
@click.option("--prompts", "file", type=click.Path(dir_okay=False, path_type=Path), help="JSONL file of prompts.")
@click.option("--category", "categories", multiple=True, help="Of the shipped prompts; repeatable.  [default: all]")
@click.option("--per-category", type=click.IntRange(1), default=2, show_default=True)
@click.option("--tokens", type=click.IntRange(8), default=96, show_default=True)
@click.option("--warm", type=click.IntRange(0), default=0, show_default=True, help="Prompts of each category.")
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True)
@click.option("--threads", type=click.IntRange(1), help="[default: idle cores]")
@click.option("--ctx", type=click.IntRange(64), default=2048, show_default=True, help="Longer prompts are left out.")
@click.option("--temperature", type=click.FloatRange(0), default=0.0, show_default=True)
@click.option("--prompt-tokens", type=click.IntRange(1), help="Put Python code before prompts that are shorter.")
@click.option("--processor-time", "processor", is_flag=True, help="On a busy Linux machine, with one thread.")
@click.option("--only", multiple=True, help="Name of a peer's arm, as a shell pattern; repeatable.")
def main(
    target: Path,
    draft: Path | None,
    server: str,
    file: Path | None,
    categories: tuple[str, ...],
    per_category: int,
    warm: int,
    tokens: int,
    repeats: int,
    threads: int | None,
    ctx: int,
    temperature: float,
    prompt_tokens: int | None,
    processor: bool,
    only: tuple[str, ...],
) -> None:
    """Compare edgespec with the peers for TARGET's format."""
    backend: BackendName = "mlx" if target.is_dir() else "llamacpp"
    binary = shutil.which(server)
    if backend == "llamacpp" and binary is None:
        raise click.ClickException(NO_PEER)
    options = LoadOptions(context_size=ctx, threads=threads or idle_cores())
    with ExitStack() as stack:
        try:
            found = read_prompts(file) if file else read_candidates(categories)
            chosen = take_candidates(found, per_category + warm)
            with closing(Engine(load_model(backend, target, options), list_loaded(), PLAIN)) as encoder:
                first = Prompt("warm-up", "", WARM_UP, encoder.encode(WARM_UP))
                prompts = select_prompts(encoder, chosen, tokens, ctx, prompt_tokens or 1)
                stop = encoder.target.tokenizer.end_of_generation
            client = open_edgespec(backend, target, draft, options, stack)
            engine = max(psutil.Process().children(), key=lambda each: each.memory_info().rss)
        except EdgespecError as error:
            raise click.ClickException(f"{error.message} {error.hint}") from error
        peers: list[Arm] = []
        if binary is not None and backend == "llamacpp":
            peers += start_servers(binary, target, draft, options, only, stack)
        elif backend == "mlx":
            peers += [arm for arm in mlx_arms(target, draft, stop) if is_wanted(arm.name, only)]
        if not peers:
            raise click.ClickException("no peer works; the lines above say why.")
        names = (*LOOKUPS, *([find_kind(draft)] if draft else []))
        arms: list[Arm] = [
            Edgespec("edgespec plain", client, Speculation(), pid=engine.pid),
            Edgespec(AUTOPILOT, client, Speculation(names), memory=MemoryUse(), pid=engine.pid),
            *peers,
        ]
        earlier, prompts = split_warm(prompts, warm)
        warm_up([first, *earlier], arms, tokens, temperature)
        runs = list(run_interleaved(arms, prompts, tokens, repeats, temperature))
        if processor:
            runs = [replace(run, generation=run.generation.on_own_processor()) for run in runs]
        idle = {arm.name: arm.idle_percent for arm in arms if isinstance(arm, LlamaServer)}
    rows = summarize(arms, runs, greedy=temperature == 0)
    click.echo(format_table(rows), err=True)
    by_category = compare_by_category([(r.prompt, r.arm, r.generation.tokens_per_second) for r in runs], AUTOPILOT)
    for category, ratios in by_category.items():
        click.echo(f"{category}: {AUTOPILOT} over " + "; ".join(map(format_ratio, ratios, ratios.values())), err=True)
    result = {
        "threads": options.threads,
        "context": ctx,
        "prompt_tokens": [len(prompt.ids) for prompt in prompts],
        "tokens": tokens,
        "repeats": repeats,
        "temperature": temperature,
        "prompts": [prompt.id for prompt in prompts],
        "warm": [prompt.id for prompt in earlier],
        "arms": rows,
        "categories": by_category,
        "llama_server": read_version(binary) if idle and binary else None,
        "idle_cpu_percent": idle,
        "runs": [make_record(run) for run in runs],
    }
    print_result("peers", result, *(path for path in (target, draft) if path))


def find_kind(draft: Path) -> str:
    """The drafter that `draft` is loaded for: 'model', or the kind of a trained head."""
    head = read_head(draft)
    return "model" if head is None else head.kind


def is_wanted(name: str, only: Sequence[str]) -> bool:
    """A program's plain arm always is, because the others are compared with it."""
    return not only or name.endswith(" plain") or any(fnmatch.fnmatch(name, f"*{pattern}") for pattern in only)


def start_servers(
    binary: str, target: Path, draft: Path | None, load: LoadOptions, only: Sequence[str], stack: ExitStack
) -> list[LlamaServer]:
    """A process for each draft mode that works and fits into memory; `stack` ends them."""
    help_text = read_help(binary)
    logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    started = []
    kind = find_kind(draft).replace("model", "simple") if draft else None
    for mode, options in list_draft_modes(help_text, kind).items():
        if not is_wanted(f"llama-server {mode}", only):
            continue
        needed = target.stat().st_size + (draft.stat().st_size if draft else 0)
        if psutil.virtual_memory().available < MEMORY_MARGIN * needed:
            click.echo(f"llama-server {mode} is left out: not enough memory for one more.", err=True)
            continue
        try:
            arm = LlamaServer(binary, help_text, mode, options, target, draft, load, logs)
        except PeerFailed as error:
            click.echo(f"llama-server {mode} is left out: {error}", err=True)
            continue
        stack.callback(arm.close)
        started.append(arm)
    return started


def warm_up(prompts: Sequence[Prompt], arms: list[Arm], tokens: int, temperature: float) -> None:
    """One generation of each prompt by each arm; an arm that fails is removed from `arms`."""
    for arm in list(arms):
        try:
            for prompt in prompts:
                arm.generate(prompt, tokens, temperature)
            if isinstance(arm, LlamaServer):
                arm.rest()
        except PeerFailed as error:
            click.echo(f"{arm.name} is left out: {error}", err=True)
            arms.remove(arm)


def run_interleaved(
    arms: list[Arm], prompts: Sequence[Prompt], tokens: int, repeats: int, temperature: float
) -> Iterator[Run]:
    """All repeats of a prompt in a row, so that only the first has to read it; an arm that fails is removed."""
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
    """[columns] of each arm that is left; `arms[0]` is edgespec's plain decoding."""
    speeds = {(run.arm, run.prompt.id, run.repeat): run.generation.tokens_per_second for run in runs}
    expected = {run.prompt.id: run.generation.tokens for run in reversed(runs) if run.arm == arms[0].name}

    def mean_ratio(arm: str, reference: str) -> float | None:
        pairs = [(speeds[key], speeds.get((reference, *key[1:]))) for key in speeds if key[0] == arm]
        ratios = [a / b for a, b in pairs if a and b]
        return round(statistics.geometric_mean(ratios), 3) if ratios else None

    rows: dict[str, dict[str, Any]] = {}
    for arm in arms:
        own_runs = [run for run in runs if run.arm == arm.name]
        generations = [run.generation for run in own_runs]
        drafted, rounds = sum(g.drafted for g in generations), sum(g.rounds for g in generations)
        references = [expected[run.prompt.id] for run in own_runs]
        common = [common_prefix(a, g.tokens) for a, g in zip(references, generations, strict=True)]
        same = [n == len(a) == len(g.tokens) for n, a, g in zip(common, references, generations, strict=True)]
        differing = [n for n, equal in zip(common, same, strict=True) if not equal]
        rows[arm.name] = {
            "tokens/s": median([g.tokens_per_second for g in generations]),
            "own": median([g.own.get("predicted_per_second", g.own.get("tokens_per_second")) for g in generations]),
            "x plain": mean_ratio(arm.name, arms[0].name),
            "x own": mean_ratio(arm.name, arm.own_plain),
            "tau": round(sum(g.later for g in generations) / rounds, 2) if rounds else None,
            "accepted": round(sum(g.accepted for g in generations) / drafted, 2) if drafted else None,
            "same": f"{sum(same)}/{len(same)}" if greedy else None,
            "from": min(differing) if greedy and differing else None,
        }
    return rows


def median(values: Sequence[float | None]) -> float | None:
    """Of the values that are known, rounded."""
    known = [value for value in values if value]
    return round(statistics.median(known), 2) if known else None


def common_prefix(expected: Sequence[int | None], found: Sequence[int | None]) -> int:
    """Number of tokens before the first that differs; None, a token that was not sent, agrees with any."""
    pairs = zip(expected, found, strict=False)
    differences = (i for i, (a, b) in enumerate(pairs) if None not in (a, b) and a != b)
    return next(differences, min(len(expected), len(found)))


def format_table(rows: dict[str, dict[str, Any]]) -> str:
    cells: list[tuple[str, ...]] = [("arm", *COLUMNS)]
    cells += [(name, *("-" if row[key] is None else str(row[key]) for key in COLUMNS)) for name, row in rows.items()]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))])
        for line in cells
    )


def make_record(run: Run) -> dict[str, Any]:
    generation = run.generation
    return {
        "arm": run.arm,
        "prompt": run.prompt.id,
        "category": run.prompt.category,
        "repeat": run.repeat,
        "emitted": len(generation.tokens),
        "tokens_per_second": generation.tokens_per_second,
        "rounds": generation.rounds,
        "drafted": generation.drafted,
        "accepted": generation.accepted,
        "own": generation.own,
    }


if __name__ == "__main__":
    main()
