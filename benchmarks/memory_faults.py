"""Faults of the memory of earlier texts, on purpose and many times: what is lost, what is found afterwards.

    uv run python -m benchmarks.memory_faults [--kills 200]

kill            kill -9 of an engine's memory that stores texts, forgets some, builds and merges segments: at a random
                moment, or, every second time, when it has begun to write a segment
two writers     two such processes on one folder, of which one is killed
corrupt         one byte of a segment file changed at a random place, or the file cut there
full disk       no file may grow beyond a random size

After each fault another memory opens the folder, builds what is missing, and every text is looked up. stdout ends with
one JSON line; the exit code is 1 if anything was lost, revived, wrong, or in the way.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic, sleep

import click
import numpy as np

from benchmarks.harness import print_result
from edgespec.memory.memory import Memory
from edgespec.memory.space import MemorySpace
from edgespec.memory.store import TextStore

_TOKENIZER = "tokenizer"
_LIMIT = 2**40  # bytes: nothing ages out
_TOKENS = 6000  # of a text
_MAX_S = 0.6  # from the first text to the kill
_WRITE_S = 0.0005  # from the first byte of a segment to the kill
_FORGOTTEN = 5  # one text in so many is forgotten at once
_PER_FOLDER = 10  # faults on one folder


@dataclass
class Outcome:
    """What became of the texts.

    faults    how often the fault was made
    texts     those that were reported as stored
    lost      of these, those that are neither stored nor found
    revived   texts that were reported as forgotten and are stored
    wrong     stored texts or found continuations that nobody has added
    leftover  files that belong to nothing, after the next memory has run
    partial   faults after which there were such files before
    notices   sentences for the user about the folder
    """

    fault: str
    faults: int = 0
    texts: int = 0
    lost: int = 0
    revived: int = 0
    wrong: int = 0
    leftover: int = 0
    partial: int = 0
    notices: int = 0

    @property
    def is_good(self) -> bool:
        return not (self.lost or self.revived or self.wrong or self.leftover)


def make_text(seed: int) -> list[int]:
    """Tokens that no other seed has in this order."""
    tokens: list[int] = np.random.default_rng(seed).integers(0, 50_000, _TOKENS).tolist()
    return tokens


def is_found(space: MemorySpace, text: list[int]) -> bool:
    """Whether the middle of a text is found."""
    matches = space.find(text[:3000], 1)
    return matches is not None and matches.length == 32


def write_texts(folder: Path, first: int) -> None:
    """The process that is killed: prints each text that is stored, and each that is forgotten."""
    memory = Memory(folder, _TOKENIZER, _LIMIT)
    memory.set_idle(True)
    space, store = memory.space(""), TextStore.open(folder)
    for seed in range(first, first + 10_000):
        text = make_text(seed)
        while not is_found(space, text):  # a text that is added while others are forgotten is not kept
            space.refresh()
            space.add(text, 100, str(seed))
            memory.flush()
        print("stored", seed, flush=True)
        if seed % _FORGOTTEN == 0:
            store.forget(str(seed))
            print("forgotten", seed, flush=True)
            space.refresh()


class Writer:
    """A process of `write_texts`."""

    def __init__(self, folder: Path, first: int) -> None:
        command = [sys.executable, "-m", "benchmarks.memory_faults", "--child", str(folder), "--first", str(first)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self._first = self._process.stdout.readline()

    def kill(self) -> tuple[set[int], set[int]]:
        """(stored, forgotten) as far as it has said so. A text that is being forgotten is in neither."""
        self._process.kill()
        said = [line.split() for line in (self._first + self._process.communicate()[0]).splitlines(keepends=True)]
        stored = {int(seed) for what, seed in said if what == "stored"}
        forgotten = {int(seed) for what, seed in said if what == "forgotten"}
        return {seed for seed in stored if seed % _FORGOTTEN}, forgotten


def list_leftovers(folder: Path) -> int:
    """The number of segment files that the database does not know."""
    store = TextStore.open(folder)
    ((n_known,),) = store.query("SELECT count(*) FROM segments")
    n = sum(".segment" in file.name for file in folder.iterdir()) - int(n_known)
    store.close()
    return n


def examine(folder: Path, stored: set[int], forgotten: set[int], outcome: Outcome) -> None:
    """Count what is left after a fault, in the database and by looking up every text."""
    outcome.faults += 1
    outcome.texts += len(stored)
    outcome.partial += list_leftovers(folder) > 0
    store = TextStore.open(folder)
    outcome.notices += store.notice is not None
    kept: dict[int, list[int]] = {}
    for record in store.export():
        kept.setdefault(int(record.source or 0), []).extend(record.tokens)
    store.close()
    outcome.wrong += sum(tokens != make_text(seed) for seed, tokens in kept.items())
    outcome.revived += len(kept.keys() & forgotten)
    memory = Memory(folder, _TOKENIZER, _LIMIT)
    memory.set_idle(True)
    space = memory.space("")
    memory.flush()
    outcome.notices += memory.take_notice() is not None
    for seed in stored | kept.keys():
        text = make_text(seed)
        matches = space.find(text[:3000], 1)
        follows = matches.places[0].read(50) if matches and matches.length == 32 else []
        outcome.lost += not follows
        outcome.wrong += bool(follows) and follows != text[3000:3050]
    for seed in forgotten:
        matches = space.find(make_text(seed)[:3000], 1)
        outcome.revived += matches is not None and matches.length > 8
    memory.close()
    outcome.leftover += list_leftovers(folder)


@contextmanager
def folders() -> Iterator[Callable[[], Path]]:
    """A function that gives the folder for the next fault: a new one now and then, with all that was stored in it."""
    with tempfile.TemporaryDirectory() as name:
        n = 0

        def take() -> Path:
            nonlocal n
            n += 1
            return Path(name) / str((n - 1) // _PER_FOLDER)

        yield take


def wait_for_write(folder: Path) -> None:
    """Return when a segment is being written; after a while in any case."""
    stop_s = monotonic() + _MAX_S
    while monotonic() < stop_s:
        if any(name.startswith(".") for name in os.listdir(folder)):
            return


def kill_writers(n: int, n_writers: int, rng: random.Random) -> Outcome:
    """Kill one writer of `n_writers`, then the others."""
    outcome = Outcome("kill" if n_writers == 1 else "two writers")
    known: dict[Path, tuple[set[int], set[int]]] = {}
    with folders() as take:
        for i in range(n):
            folder = take()
            stored, forgotten = known.setdefault(folder, (set(), set()))
            writers = [Writer(folder, 20_000 * (n_writers * i + j)) for j in range(n_writers)]
            if i % 2:
                wait_for_write(folder)
                sleep(rng.uniform(0, _WRITE_S))
            else:
                sleep(rng.uniform(0, _MAX_S))
            for writer in writers:
                new = writer.kill()
                stored |= new[0]
                forgotten |= new[1]
            examine(folder, stored, forgotten, outcome)
    return outcome


def corrupt_segments(n: int, rng: random.Random) -> Outcome:
    """Change or cut the largest segment at a random byte."""
    outcome = Outcome("corrupt")
    seeds = set(range(6))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        memory = Memory(folder, _TOKENIZER, _LIMIT)
        for seed in seeds:
            memory.space("").add(make_text(seed), 100, str(seed))
        memory.set_idle(True)
        memory.flush()
        memory.close()
        for i in range(n):
            file = max(folder.glob("*.segment"), key=lambda file: file.stat().st_size)
            data = file.read_bytes()
            place = rng.randrange(200) if i % 3 == 0 else rng.randrange(len(data))
            changed = bytes([data[place] ^ 1 << rng.randrange(8)])
            file.write_bytes(data[:place] + (b"" if i % 3 == 2 else changed + data[place + 1 :]))
            examine(folder, seeds, set(), outcome)
    return outcome


def fill_disk(n: int, rng: random.Random) -> Outcome:
    """Store texts while no file may grow beyond a random size; all of them are found, and stored at the end."""
    outcome = Outcome("full disk")
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    seeds = set(range(8))
    for _ in range(n):
        with tempfile.TemporaryDirectory() as name:
            memory = Memory(Path(name), _TOKENIZER, _LIMIT)
            memory.set_idle(True)
            try:
                resource.setrlimit(resource.RLIMIT_FSIZE, (rng.randrange(20_000, 400_000), hard))
                for seed in seeds:
                    memory.space("").add(make_text(seed), 100, str(seed))
                    memory.flush()
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
            outcome.notices += memory.take_notice() is not None
            memory.flush()
            memory.close()
            examine(Path(name), seeds, set(), outcome)
    signal.signal(signal.SIGXFSZ, before)
    return outcome


@click.command()
@click.option("--kills", type=click.IntRange(1), default=200, show_default=True)
@click.option("--others", type=click.IntRange(1), default=50, show_default=True, help="Faults of each other kind.")
@click.option("--child", type=click.Path(path_type=Path), hidden=True)
@click.option("--first", type=int, default=0, hidden=True)
def main(kills: int, others: int, child: Path | None, first: int) -> None:
    """Kill, corrupt and fill."""
    if child is not None:
        with suppress(BrokenPipeError):
            write_texts(child, first)
        return
    rng = random.Random(0)
    outcomes = [
        kill_writers(kills, 1, rng),
        kill_writers(others, 2, rng),
        corrupt_segments(others, rng),
        fill_disk(others, rng),
    ]
    for outcome in outcomes:
        click.echo(" ".join(f"{key} {value}" for key, value in asdict(outcome).items()), err=True)
    print_result("memory_faults", {"rows": [asdict(outcome) for outcome in outcomes]})
    sys.exit(not all(outcome.is_good for outcome in outcomes))


if __name__ == "__main__":
    main()
