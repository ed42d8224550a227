"""edgespec compared with other programs that decode speculatively: the same files and prompts in one interleaved run.

    uv run python -m benchmarks.peers --target T.gguf [--draft D.gguf] [--llama-server PATH] [--prompts FILE] \
        [--form chat --form raw] [--drafter ngram ...] [--record runs.jsonl --table table.md]

For GGUF files the peer is llama.cpp's `llama-server`: one process for each draft mode that its --help lists, with its
own default draft lengths. For MLX folders it is mlx_lm. All get the same token ids, threads and context: the first turn
of each prompt, in the model's chat template or raw. edgespec runs in engine processes, as the chat and the server run
it. They measure their settings and costs on load. "edgespec auto" has --draft auto, or lookups and the --draft model.
Each --drafter is one more arm, alone and with drafts of a fixed length; `recycling@4/16` is a tree of 16 tokens, four
of them on a path. Arms that differ in these numbers alone share a process.

The autopilot remembers its answers, so later repeats of a question recite the first one.

After a warm-up on another text the arms of a prompt take turns, in reverse order on every second prompt. Each reads the
prompt with an empty prompt cache, because what a cache holds changes how the next prompt is read, and its rounding.
What a program learns from its answers is kept: the autopilot's costs and memory, and ngram-mod's pool. So prompts that
are repeated (--repeats) are not cold. Both forms start with new processes.

Speed is (tokens - 1) / time from the first token to the last, as the reader of the stream sees them; with
--processor-time by the program's processor time, which others disturb less. Another table then has the autopilot's
first answers beside plain decoding, and beside their own rounds without a draft. An arm that drafted nothing shows the
machine's noise. --record has a line for each round of all arms: a run that was interrupted goes on there, with the
settings that were measured at first and with empty memories. --table has the tables of `benchmarks.peers_tables`.
stdout ends with one JSON line.
"""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import psutil

from benchmarks.harness import MODEL_PATH, PLAIN, describe, list_loaded, load_model, print_result
from benchmarks.peers_arms import Arm, Edgespec, Form, Generation, PeerFailed, Prompt, mlx_arms, open_edgespec
from benchmarks.peers_arms import select_prompts as select
from benchmarks.peers_server import LlamaServer, list_draft_modes, read_help, read_version
from benchmarks.peers_tables import (
    AUTOPILOT,
    Record,
    Round,
    Run,
    format_first,
    format_markdown,
    list_first,
    summarize,
)
from benchmarks.peers_tables import PLAIN as EDGESPEC_PLAIN
from edgespec.autopilot.speculation import MAX_DRAFT, Speculation
from edgespec.backends import BackendName
from edgespec.backends.options import LoadOptions, idle_cores
from edgespec.bench.prompt_sets import BenchPrompt, read_prompts, read_shipped_prompts, take_per_category
from edgespec.client.process import EngineProcess
from edgespec.drafters.registry import find_spec
from edgespec.engine.engine import Engine
from edgespec.engine.events import MemoryUse
from edgespec.errors import EdgespecError
from edgespec.formats.head_file import read_head

LOOKUPS = ("ngram", "suffix")
WARM_UP = "def mean(values: list[float]) -> float:\n    return sum(values) / len(values)\n\n\ndef median("
MEMORY_MARGIN = 1.2  # over the size of the weights that a server repacks
NO_PEER = (
    "llama-server was not found: install llama.cpp, or name the program with --llama-server PATH. "
    "With --llama-server none edgespec runs alone."
)


@dataclass(frozen=True, slots=True)
class Setting:
    """What all rounds of a run have in common. `server` is the path of llama-server; None where it does not run."""

    backend: BackendName
    target: Path
    draft: Path | None
    server: str | None
    options: LoadOptions
    drafters: tuple[str, ...]
    draft_max: int
    draft_tree: int | None
    only: tuple[str, ...]
    tokens: int
    temperature: float
    processor: bool

    @property
    def files(self) -> list[Path]:
        return [path for path in (self.target, self.draft) if path]

    def speculate(self, drafter: str, draft_max: int | None = None, draft_tree: int | None = None) -> Speculation:
        """How an arm drafts that has `drafter` alone."""
        return Speculation((drafter,), draft_max or self.draft_max, draft_tree or self.draft_tree)

    def describe(self) -> dict[str, Any]:
        """What the figures depend on."""
        return {
            "threads": self.options.threads,
            "context": self.options.context_size,
            "tokens": self.tokens,
            "temperature": self.temperature,
            "processor_time": self.processor,
            "draft_max": self.draft_max,
            "draft_tree": self.draft_tree,
            "llama_server": read_version(self.server) if self.server else None,
            **describe(*self.files),
        }


@click.command()
@click.option("--target", required=True, type=MODEL_PATH)
@click.option("--draft", type=MODEL_PATH)
@click.option("--llama-server", "server", default="llama-server", show_default=True, help="Name on PATH, or path.")
@click.option("--prompts", "file", type=click.Path(dir_okay=False, path_type=Path), help="JSONL file of prompts.")
@click.option("--category", "categories", multiple=True, help="Repeatable.  [default: all]")
@click.option("--per-category", type=click.IntRange(1), default=2, show_default=True)
@click.option(
    "--form", "forms", type=click.Choice(["chat", "raw"]), multiple=True, default=("chat",), show_default=True
)
@click.option(
    "--drafter", "drafters", multiple=True, help="As in edgespec's --draft: an arm that it has alone; WORD@4/16."
)
@click.option("--draft-max", type=click.IntRange(1, 63), default=4, show_default=True, help="Of those arms, in tokens.")
@click.option("--draft-tree", type=click.IntRange(1, 63), help="Likewise in all; more than --draft-max make trees.")
@click.option("--tokens", type=click.IntRange(8), default=128, show_default=True)
@click.option("--repeats", type=click.IntRange(1), default=1, show_default=True)
@click.option("--threads", type=click.IntRange(1), help="[default: idle cores]")
@click.option("--ctx", type=click.IntRange(64), default=2048, show_default=True, help="Longer prompts are left out.")
@click.option("--temperature", type=click.FloatRange(0), default=0.0, show_default=True)
@click.option("--processor-time", "processor", is_flag=True, help="On a busy Linux machine, with one thread.")
@click.option("--only", multiple=True, help="Name of a peer's arm, as a shell pattern; repeatable.")
@click.option("--record", type=click.Path(dir_okay=False, path_type=Path), help="JSONL file of rounds, to go on from.")
@click.option("--table", type=click.Path(dir_okay=False, path_type=Path), help="Write the tables as Markdown.")
def main(
    target: Path,
    draft: Path | None,
    server: str,
    file: Path | None,
    categories: tuple[str, ...],
    per_category: int,
    forms: tuple[Form, ...],
    drafters: tuple[str, ...],
    draft_max: int,
    draft_tree: int | None,
    tokens: int,
    repeats: int,
    threads: int | None,
    ctx: int,
    temperature: float,
    processor: bool,
    only: tuple[str, ...],
    record: Path | None,
    table: Path | None,
) -> None:
    """Compare edgespec with the peers for TARGET's format."""
    backend: BackendName = "mlx" if target.is_dir() else "llamacpp"
    binary = shutil.which(server) if backend == "llamacpp" else None
    if backend == "llamacpp" and binary is None and server != "none":
        raise click.ClickException(NO_PEER)
    options = LoadOptions(context_size=ctx, threads=threads or idle_cores())
    setting = Setting(
        backend, target, draft, binary, options, drafters, draft_max, draft_tree, only, tokens, temperature, processor
    )
    conditions = setting.describe()
    rounds = Record(record, conditions)
    with ExitStack() as stack:
        os.environ["EDGESPEC_CACHE_DIR"] = (
            f"{record}.cache" if record else stack.enter_context(tempfile.TemporaryDirectory())
        )
        try:
            chosen = choose_prompts(file, categories, per_category)
            with closing(Engine(load_model(backend, target, options), list_loaded(), PLAIN)) as encoder:
                first = Prompt("warm-up", "", tuple(encoder.encode(WARM_UP)))
                stop = encoder.target.tokenizer.end_of_generation
                prompts = {form: select(encoder, chosen, form, tokens, ctx) for form in forms}
            for form in forms:
                missing = [(p, n) for p in prompts[form] for n in range(repeats) if not rounds.has(form, p.id, n)]
                if missing:
                    run_form(setting, form, first, missing, stop, rounds)
        except EdgespecError as error:
            raise click.ClickException(f"{error.message} {error.hint}") from error
    groups = summarize(rounds.rounds)
    first_answers = format_first(list_first(rounds.rounds)) if processor else ""
    if table:
        table.write_text(f"{format_markdown(groups)}\n{first_answers}", encoding="utf-8")
    click.echo(f"{format_markdown(groups[:1])}\n{first_answers}", err=True)
    print_result("peers", {**conditions, "groups": [asdict(group) for group in groups]}, *setting.files)


def choose_prompts(file: Path | None, categories: Sequence[str], limit: int) -> list[BenchPrompt]:
    """The first `limit` prompts of each category, of `file` or the shipped ones. Raises InvalidRequest."""
    if file is None:
        return take_per_category(read_shipped_prompts(categories or None), limit)
    prompts = [each for each in read_prompts(file) if not categories or each.category in categories]
    if not prompts:
        raise click.ClickException(f"{file} has no prompts of these categories.")
    return take_per_category(prompts, limit)


def run_form(
    setting: Setting,
    form: Form,
    first: Prompt,
    missing: Sequence[tuple[Prompt, int]],
    stop: frozenset[int],
    rounds: Record,
) -> None:
    """Add the rounds of `missing`, by new processes. Raises EdgespecError, click.ClickException."""
    with ExitStack() as stack:
        peers: list[Arm] = []
        if setting.backend == "mlx":
            peers = [a for a in mlx_arms(setting.target, setting.draft, stop) if is_wanted(a.name, setting.only)]
        elif setting.server is not None:
            peers = [*start_servers(setting, setting.server, stack)]
            if not peers:
                raise click.ClickException("no mode of llama-server works; the lines above say why.")
        run_interleaved([*open_arms(setting, stack), *peers], setting, form, first, missing, rounds)


def open_arms(setting: Setting, stack: ExitStack) -> list[Arm]:
    """edgespec's arms. Plain decoding and the autopilot share a process. Raises EdgespecError."""

    def start(draft: str) -> tuple[EngineProcess, int]:
        return open_edgespec(setting.backend, setting.target, draft, setting.options, stack)

    process = start("+".join([*LOOKUPS, str(setting.draft)]) if setting.draft else "auto")
    arms: list[Arm] = [
        Edgespec(EDGESPEC_PLAIN, *process, Speculation()),
        Edgespec(AUTOPILOT, *process, None, memory=MemoryUse()),
    ]
    if setting.draft:
        head = read_head(setting.draft)
        drafter = "model" if head is None else head.kind
        arms.append(Edgespec(f"edgespec {drafter}", *process, setting.speculate(drafter)))
    started: dict[str, tuple[EngineProcess, int]] = {}
    for word in setting.drafters:
        draft, sizes = split_size(word)
        name, _, model = draft.partition(":")
        spec = find_spec(name)
        if spec is None or not (model or spec.needs in ("nothing", "memory", "target")):
            raise click.BadParameter(f"{word} is no drafter without a model.", param_hint="--drafter")
        try:
            process = started[draft] = started.get(draft) or start(draft)
        except EdgespecError as error:
            click.echo(f"edgespec {word} is left out: {error.message}", err=True)
            continue
        arms.append(Edgespec(f"edgespec {word}", *process, setting.speculate(spec.name, *sizes)))
    return arms


def split_size(word: str) -> tuple[str, list[int]]:
    """The drafter of WORD@4/16, and its sizes as far as it gives them: tokens on a path, tokens in all. Raises
    BadParameter.
    """
    draft, *sizes = re.split(r"@(\d+)(?:/(\d+))?$", word)
    found = [int(each) for each in sizes if each]
    if not all(0 < each <= MAX_DRAFT for each in found):
        raise click.BadParameter(f"a draft has 1 to {MAX_DRAFT} tokens.", param_hint="--drafter")
    return draft, found


def is_wanted(name: str, only: Sequence[str]) -> bool:
    """A program's plain arm always is, because the others are compared with it."""
    return not only or name.endswith(" plain") or any(fnmatch.fnmatch(name, f"*{pattern}") for pattern in only)


def start_servers(setting: Setting, binary: str, stack: ExitStack) -> list[LlamaServer]:
    """A process for each draft mode that works and fits into memory; `stack` ends them."""
    help_text = read_help(binary)
    logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    started = []
    head = read_head(setting.draft) if setting.draft else None
    kind = head.kind if head else "simple" if setting.draft else None
    needed = sum(path.stat().st_size for path in setting.files)
    for mode, options in list_draft_modes(help_text, kind).items():
        if not is_wanted(f"llama-server {mode}", setting.only):
            continue
        if psutil.virtual_memory().available < MEMORY_MARGIN * needed:
            click.echo(f"llama-server {mode} is left out: not enough memory for one more.", err=True)
            continue
        try:
            arm = LlamaServer(binary, help_text, mode, options, setting.target, setting.draft, setting.options, logs)
        except PeerFailed as error:
            click.echo(f"llama-server {mode} is left out: {error}", err=True)
            continue
        stack.callback(arm.close)
        started.append(arm)
    return started


def run_interleaved(
    arms: list[Arm],
    setting: Setting,
    form: Form,
    first: Prompt,
    missing: Sequence[tuple[Prompt, int]],
    rounds: Record,
) -> None:
    """Add a round for each prompt and repeat of `missing`, after one on `first`. An arm that fails is removed."""
    for n, (prompt, repeat) in enumerate([(first, 0), *missing]):
        runs: dict[str, Run] = {}
        for arm in arms[:: 1 if n % 2 == 0 else -1]:
            try:
                found = arm.generate(prompt, setting.tokens, setting.temperature)
                runs[arm.name] = measure(arm.name, found, setting.processor)
                if n == 0 and isinstance(arm, LlamaServer):
                    arm.rest()
            except PeerFailed as error:
                click.echo(f"{arm.name} is left out from here: {error}", err=True)
                arms.remove(arm)
        if n:
            in_order = tuple(runs[arm.name] for arm in arms if arm.name in runs)
            rounds.add(Round(form, prompt.id, prompt.category, repeat, in_order))
            click.echo(f"{form}: {n}/{len(missing)} ({prompt.id})", err=True)


def measure(arm: str, found: Generation, processor: bool) -> Run:
    """`found` as a Run, with the time of the program's processor or by the clock."""
    seconds = found.busy_s if processor and found.busy_s else found.wall_s
    counts = found.rounds, found.drafted, found.accepted
    return Run(arm, found.tokens, found.later, seconds, found.wall_s, *counts, found.deciding_s, found.plain_s)


if __name__ == "__main__":
    main()
