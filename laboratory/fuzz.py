"""Open damaged and hostile files as a user would, each in a process of its own, and count what became of it.

    uv run python -m laboratory.fuzz [--kind gguf-metadata ...] [--opens 25] [--seed 0] [--results FILE] [--keep FOLDER]

Each kind of file has `--opens` cases. A case is made from the seed, the kind and its number alone, so that it can be
made again; with --results, cases that the file has are not run again. The ends are "answered"; "told", a documented
exit code with a sentence; "hang", more than 30 seconds; "memory", more than 2 GiB; "internal", the exit code of a bug;
and "death" by a signal. The last four are faults: their files go to --keep, and the exit code is 1. stdout ends with
one JSON line.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic, sleep

import click

from benchmarks.harness import TARGET, print_result
from laboratory.fuzz_cases import KINDS, PROMPT, Place, answer, make_answers

REPOSITORY = Path(__file__).resolve().parent.parent
FAULTS = ("hang", "memory", "internal", "death")
_LIMIT_S = 30.0
_LIMIT_BYTES = 2 * 2**30
_INTERNAL = 70
HUB = "hub"
"""The kind whose files are the answers of a hub."""
ALL_KINDS = (*KINDS, HUB)


@dataclass(frozen=True, slots=True)
class End:
    """What became of a case: its seed, kind and number, the end, the exit code, seconds, bytes, and the last words."""

    seed: int
    kind: str
    number: int
    end: str
    code: int
    seconds: float
    peak: int
    said: str


def open_case(kind: str, number: int, seed: int, mlx: Path, keep: Path | None) -> End:
    rng = random.Random(f"{seed} {kind} {number}")
    with tempfile.TemporaryDirectory() as scratch:
        place = Place(Path(scratch), mlx)
        if kind == HUB:
            with answer(make_answers(rng)) as url:
                found = run_case(["pull", "me/model:Q4_0"], place, url)
        else:
            found = run_case(KINDS[kind](rng, place), place, "http://127.0.0.1:9")
        end = End(seed, kind, number, *found)
        if end.end in FAULTS and keep is not None:
            shutil.copytree(place.folder, keep / f"{kind}-{number}", dirs_exist_ok=True)
    return end


def run_case(command: list[str], place: Place, hub: str) -> tuple[str, int, float, int, str]:
    """Run a command in a fork of this process: its end, exit code, seconds, peak of memory, and last words."""
    began_s, output = monotonic(), place.folder / "output"
    child = os.fork()
    if not child:
        _become(command, place, hub, output)
    while True:
        pid, status, used = os.wait4(child, os.WNOHANG)
        if pid:
            break
        if monotonic() - began_s > _LIMIT_S:
            os.killpg(child, signal.SIGKILL)
            _, status, used = os.wait4(child, 0)
            break
        sleep(0.005)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what the command has left
    seconds, code, peak = monotonic() - began_s, os.waitstatus_to_exitcode(status), used.ru_maxrss * 1024
    said = output.read_text(errors="replace").strip().splitlines()[-2:] if output.exists() else []
    end = "answered" if code == 0 else "told"
    if seconds > _LIMIT_S:
        end = "hang"
    elif code < 0 or code > 128:
        end = "death"
    elif code == _INTERNAL:
        end = "internal"
    elif peak > _LIMIT_BYTES:
        end = "memory"
    return end, code, round(seconds, 2), peak, " ".join(said)[:300]


def _become(command: list[str], place: Place, hub: str, output: Path) -> None:
    """Be the command, in a process group of its own."""
    os.setsid()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    file = os.open(output, os.O_CREAT | os.O_WRONLY)
    for target in (1, 2):
        os.dup2(file, target)
    sys.stdout, sys.stderr = (os.fdopen(target, "w", buffering=1, closefd=False) for target in (1, 2))
    folders = {f"EDGESPEC_{name.upper()}_DIR": str(place.folder / name) for name in ("data", "cache", "config")}
    os.environ.update(folders, HF_ENDPOINT=hub, HF_HOME=str(place.folder / "hf"), MKL_NUM_THREADS="1")
    os.chdir(place.folder)
    code = 99
    try:
        importlib.import_module("edgespec.cli.main").main(command)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(bool(error.code))
    finally:
        with suppress(Exception):
            sys.stdout.flush()
        os._exit(code)


def prepare(folder: Path) -> Path:
    """The target as an MLX folder, and beside it what two answers with a memory leave; returns the former."""
    mlx = folder / "mlx"
    command = [
        sys.executable,
        "-m",
        "laboratory.cost_faithful",
        "own",
        str(mlx),
        "--source",
        str(TARGET),
        "--type",
        "F16",
    ]
    subprocess.run(command, check=True, cwd=REPOSITORY, capture_output=True)
    place = Place(folder, mlx)
    for text in ("def g(y):", "class A:"):
        opened = ["run", text, "--model", str(TARGET), *PROMPT, "--memory", "--draft", "ngram+suffix"]
        found = run_case(opened, place, "http://127.0.0.1:9")
        if found[0] != "answered":
            raise click.ClickException(f"the base case ended otherwise: {found}")
    return mlx


@click.command()
@click.option("--kind", "kinds", multiple=True, type=click.Choice(ALL_KINDS), help="[default: all]")
@click.option("--opens", type=click.IntRange(1), default=25, show_default=True, help="Cases of each kind.")
@click.option("--seed", default=0, show_default=True)
@click.option(
    "--results", type=click.Path(dir_okay=False, path_type=Path), help="JSON lines, of which none is run again."
)
@click.option("--keep", type=click.Path(file_okay=False, path_type=Path), help="Folder for the files of faults.")
def main(kinds: tuple[str, ...], opens: int, seed: int, results: Path | None, keep: Path | None) -> None:
    """Open damaged files of each kind, and count the ends."""
    for name in ("main", "run", "memory", "models", "doctor"):
        importlib.import_module(f"edgespec.cli.{name}")
    gc.freeze()
    chosen = kinds or ALL_KINDS
    ends: dict[tuple[str, int], End] = {}
    if results is not None and results.is_file():
        known = [End(**json.loads(line)) for line in results.read_text().splitlines()]
        ends = {(each.kind, each.number): each for each in known if each.seed == seed}
    with tempfile.TemporaryDirectory() as base:
        mlx = prepare(Path(base))
        for kind in chosen:
            for number in range(opens):
                if (kind, number) in ends:
                    continue
                end = ends[kind, number] = open_case(kind, number, seed, mlx, keep)
                if results is not None:
                    with open(results, "a") as file:
                        file.write(json.dumps(asdict(end)) + "\n")
                if end.end in FAULTS:
                    click.echo(f"{kind} {number}: {end.end} {end.code} {end.seconds} s {end.said}", err=True)
    table = {kind: Counter(end.end for (of, _), end in ends.items() if of == kind) for kind in chosen}
    for kind, counts in table.items():
        click.echo(f"{kind:22}{', '.join(f'{n} {end}' for end, n in counts.most_common())}", err=True)
    faults = sum(counts[end] for counts in table.values() for end in FAULTS)
    print_result(
        "fuzz", {"seed": seed, "opens": sum(map(Counter.total, table.values())), "faults": faults, "kinds": table}
    )
    sys.exit(faults > 0)


if __name__ == "__main__":
    main()
