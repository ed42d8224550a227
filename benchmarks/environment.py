"""What an environment variable changes in forwards of one model: huge pages, waiting threads, another native library.

    uv run python -m benchmarks.environment MODEL.gguf --set GLIBC_TUNABLES=glibc.malloc.hugetlb=0
    uv run python -m benchmarks.environment MODEL.gguf --set GOMP_SPINCOUNT=10000 --threads 4 --burst 10 --pause-ms 0.2
    uv run python -m benchmarks.environment MODEL.gguf --set LLAMA_CPP_LIB_PATH=FOLDER --set LD_LIBRARY_PATH=FOLDER

The first command turns huge pages off, because a setting of the user's own is kept. Each pair is two processes, one
without and one with the variables. Both load the model and read the context; then they take turns, and the other one
is stopped meanwhile. A turn is a burst of forwards with pauses in which Python is busy, and counts with its median.
A ratio is the time with the variables over the time without, the median of a pair's turns; the result has its median
and extremes over the pairs. Processor time, of all threads, is disturbed less than elapsed time. stdout ends with one
JSON line.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter, process_time
from typing import Literal

import click
import psutil

from benchmarks.harness import MODEL_PATH, load_model, print_result
from edgespec.backends.options import LoadOptions
from edgespec.core.decoding import read_prompt
from edgespec.core.protocols import NO_DRAFT, Draft, Session

_STRIDE = 7919  # between the ids of tokens: any text costs the same


@dataclass(frozen=True, slots=True)
class Work:
    """One burst: `forwards` forwards of `rows` tokens after `context` tokens, each followed by `pause_s` of Python."""

    model: Path
    options: LoadOptions
    context: int
    rows: int
    forwards: int
    pause_s: float


@dataclass(frozen=True, slots=True)
class Turn:
    """Milliseconds of a burst's forwards: the median elapsed, and the mean of the processor."""

    wall_ms: float
    cpu_ms: float


def serve(link: Connection, work: Work) -> None:
    """Load the model, then answer each message with a Turn until the pipe ends."""
    model = load_model("llamacpp", work.model, work.options)
    session = model.open_session()
    tokens = [i * _STRIDE % session.capabilities.vocab_size for i in range(work.context + work.rows)]
    read_prompt(session, tokens[: work.context])
    run_burst(session, tokens, work)
    link.send(True)
    with suppress(EOFError):
        while link.recv():
            link.send(run_burst(session, tokens, work))
    session.close()
    model.close()


def run_burst(session: Session, tokens: list[int], work: Work) -> Turn:
    """Time one burst. The cache is as before at its end."""
    draft = Draft.chain(tokens[work.context + 1 :]) if work.rows > 1 else NO_DRAFT
    walls, cpu_s = [], 0.0
    for _ in range(work.forwards):
        start_s, cpu_start_s = perf_counter(), process_time()
        session.forward(tokens[work.context], draft).argmax()
        walls.append(perf_counter() - start_s)
        cpu_s += process_time() - cpu_start_s
        session.commit(())
        session.rewind(work.context)
        resume_s = perf_counter() + work.pause_s
        while perf_counter() < resume_s:
            pass
    return Turn(statistics.median(walls) * 1e3, cpu_s / work.forwards * 1e3)


class Arm:
    """A process that serves a Work; it stands still outside of its turns, whatever its threads wait for."""

    def __init__(self, link: Connection, process: psutil.Process) -> None:
        self._link = link
        self._process = process
        self.turns: list[Turn] = []
        process.suspend()

    def take_turn(self) -> None:
        """Raises EOFError where the process has ended."""
        self._process.resume()
        self._link.send(True)
        self.turns.append(self._link.recv())
        self._process.suspend()


@contextmanager
def start_arm(work: Work, variables: Mapping[str, str]) -> Iterator[Arm]:
    """Serve `work` with `variables` in the environment. Raises click.ClickException."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    before = dict(os.environ)
    os.environ.update(variables)
    process = context.Process(target=serve, args=(theirs, work))
    process.start()
    os.environ.clear()
    os.environ.update(before)
    theirs.close()
    try:
        ours.recv()
        yield Arm(ours, psutil.Process(process.pid))
    except EOFError:
        raise click.ClickException("a process ended before its answer.") from None
    finally:
        ours.close()
        with suppress(psutil.Error):
            psutil.Process(process.pid).resume()
        process.join()


def measure_pair(work: Work, variables: Mapping[str, str], turns: int, is_swapped: bool) -> tuple[list[Turn], ...]:
    """`turns` turns without and with the variables, in the order A B B A; `is_swapped` starts the latter first."""
    environments: list[Mapping[str, str]] = [variables, {}] if is_swapped else [{}, variables]
    with start_arm(work, environments[0]) as first, start_arm(work, environments[1]) as second:
        for turn in range(turns):
            for arm in (first, second) if turn % 2 == 0 else (second, first):
                arm.take_turn()
    return (second.turns, first.turns) if is_swapped else (first.turns, second.turns)


def summarize(pairs: list[tuple[list[Turn], ...]], clock: Literal["wall_ms", "cpu_ms"]) -> dict[str, float]:
    """Milliseconds of each arm, and the ratio of the second to the first over the pairs."""
    without, having = ([[getattr(turn, clock) for turn in pair[arm]] for pair in pairs] for arm in (0, 1))
    ratios = [
        statistics.median(b / a for a, b in zip(first, second, strict=True))
        for first, second in zip(without, having, strict=True)
    ]
    return {
        "without_ms": round(statistics.median(chain.from_iterable(without)), 3),
        "with_ms": round(statistics.median(chain.from_iterable(having)), 3),
        "ratio_median": round(statistics.median(ratios), 4),
        "ratio_min": round(min(ratios), 4),
        "ratio_max": round(max(ratios), 4),
    }


def parse_variables(assignments: tuple[str, ...]) -> dict[str, str]:
    """NAME=VALUE by name. Raises click.BadParameter."""
    if wrong := [each for each in assignments if not each.partition("=")[0] or "=" not in each]:
        raise click.BadParameter(f"'{wrong[0]}' is not NAME=VALUE.", param_hint="--set")
    return {name: value for name, _, value in (each.partition("=") for each in assignments)}


@click.command()
@click.argument("model", type=MODEL_PATH)
@click.option("--set", "assignments", multiple=True, required=True, metavar="NAME=VALUE", help="Repeat it for several.")
@click.option("--pairs", type=click.IntRange(1), default=7, show_default=True)
@click.option("--turns", type=click.IntRange(1), default=20, show_default=True, help="Of each process of a pair.")
@click.option("--burst", type=click.IntRange(1), default=1, show_default=True, help="Forwards in a turn.")
@click.option("--pause-ms", type=click.FloatRange(0), default=0.0, show_default=True, help="After each forward.")
@click.option("--context", type=click.IntRange(1), default=16, show_default=True)
@click.option("--rows", type=click.IntRange(1), default=1, show_default=True)
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True)
@click.option("--flash-attention/--no-flash-attention", default=None, help="[default: llama.cpp's]")
@click.option("--mmap/--no-mmap", default=True, show_default=True)
def main(
    model: Path,
    assignments: tuple[str, ...],
    pairs: int,
    turns: int,
    burst: int,
    pause_ms: float,
    context: int,
    rows: int,
    threads: int,
    flash_attention: bool | None,
    mmap: bool,
) -> None:
    """Compare forwards of the GGUF file MODEL with and without the variables."""
    variables = parse_variables(assignments)
    options = LoadOptions(context_size=context + rows + 64, threads=threads, flash_attention=flash_attention, mmap=mmap)
    work = Work(model, options, context, rows, burst, pause_ms / 1e3)
    found = []
    for pair in range(pairs):
        found.append(measure_pair(work, variables, turns, is_swapped=pair % 2 == 1))
        wall, cpu = (summarize(found, clock) for clock in ("wall_ms", "cpu_ms"))
        click.echo(f"pairs {pair + 1}: elapsed {wall['ratio_median']:.3f}, cpu {cpu['ratio_median']:.3f}", err=True)
    shape = {"context": context, "rows": rows, "threads": threads, "burst": burst, "pause_ms": pause_ms}
    result = {"set": variables, "pairs": pairs, **shape, "elapsed": wall, "cpu": cpu}
    print_result("environment", {"model": model.name, **result}, model)


if __name__ == "__main__":
    main()
