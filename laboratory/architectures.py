"""Decode with a model of every architecture that llama.cpp knows, with every kind of draft, against plain decoding.

    cmake -S vendor/llama.cpp -B build -DLLAMA_BUILD_TESTS=ON && cmake --build build --target test-llama-archs
    build/bin/test-llama-archs -o FOLDER
    uv run python -m laboratory.architectures FOLDER [--only lfm2 ...] [--arm layerskip:1 ...]

`vendor/llama.cpp` is in the source distribution of llama-cpp-python. The models are small and random; each gets a
vocabulary of characters, so that it can answer by a schema. An arm is a draft, or something else that must not change
the text: two slots, or a schema. It reads a prompt, another one with the same beginning, and the first one again; plain
decoding reads each in a cache of its own. The ends are "same"; "near tie", where rounding explains the first other
token; "differs"; "invalid", for the answer by a schema; "refused" with a sentence; "error", which should have been one;
"hang"; and "death". Each model is opened in a process of its own, and the arms after one that ends it in another. All
but "same", "near tie" and "refused" are faults, for which the exit code is 1. stdout ends with one JSON line.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from time import monotonic

import click

from benchmarks.harness import print_result
from edgespec.cancel import cancellable
from edgespec.errors import Cancelled
from edgespec.isolated import ChildDied, run_in_child
from laboratory.architecture_arms import ARMS, End, decode_arms
from laboratory.character_vocabulary import write_with_characters

FAULTS = ("differs", "invalid", "error", "hang", "death")
_LIMIT_S = 240.0  # for the arms of a model


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--only", multiple=True, help="Names of files without .gguf, or their beginnings.")
@click.option("--arm", "arms", multiple=True, type=click.Choice(list(ARMS)), help="[default: all]")
def main(folder: Path, only: tuple[str, ...], arms: tuple[str, ...]) -> None:
    """Decode with each model in FOLDER."""
    found: dict[str, dict[str, End]] = {}
    with tempfile.TemporaryDirectory(prefix="edgespec-") as base:
        os.environ |= {f"EDGESPEC_{name}_DIR": str(Path(base) / name.lower()) for name in ("CACHE", "DATA", "CONFIG")}
        for source in sorted(folder.glob("*.gguf")):
            if only and not source.stem.startswith(only):
                continue
            model = Path(base) / source.name
            write_with_characters(source, model)
            found[source.stem] = ends = sweep_model(model, ["plain", *(arm for arm in arms or ARMS if arm != "plain")])
            model.unlink()
            click.echo(format_row(source.stem, ends), err=True)
    if not found:
        raise click.ClickException(f"There is no such model in {folder}.")
    table = {arm: Counter(ends[arm].end for ends in found.values()) for arm in next(iter(found.values()))}
    for arm, counts in table.items():
        click.echo(f"{arm:14}{', '.join(f'{n} {end}' for end, n in counts.most_common())}", err=True)
    faults = sum(counts[end] for counts in table.values() for end in FAULTS)
    models = {name: {arm: asdict(end) for arm, end in ends.items()} for name, ends in found.items()}
    print_result("architectures", {"faults": faults, "arms": table, "models": models})
    sys.exit(faults > 0)


def format_row(name: str, ends: dict[str, End]) -> str:
    """The arms that ended in another way than the same text; of those, how many there were."""
    same = sum(end.end == "same" for end in ends.values())
    others = [f"{arm}: {end.end} {end.said}".strip() for arm, end in ends.items() if end.end != "same"]
    return "\n    ".join([f"{name}: {same} same", *others])


def sweep_model(model: Path, arms: Sequence[str]) -> dict[str, End]:
    """The end of each of `arms`, of which the first is "plain"."""
    ends: dict[str, End] = {}
    with tempfile.TemporaryDirectory(prefix="edgespec-") as base:
        record = Path(base) / "ends.jsonl"
        record.touch()
        until_s = monotonic() + _LIMIT_S

        def check() -> None:
            if monotonic() > until_s:
                raise Cancelled

        while missing := [arm for arm in arms if arm not in ends]:
            end = "death"
            try:
                with cancellable(check):
                    run_in_child(decode_arms, model, missing, record)
            except Cancelled:
                end, until_s = "hang", monotonic() + _LIMIT_S
            except ChildDied:
                pass
            ends = {arm: End(**rest) for arm, rest in map(json.loads, record.read_text().splitlines())}
            if unfinished := next((arm for arm in arms if arm not in ends), None):
                ends[unfinished] = End(end, read_last_words(record.with_suffix(".stderr")))
                with record.open("a") as file:
                    file.write(json.dumps([unfinished, asdict(ends[unfinished])]) + "\n")
    return ends


def read_last_words(log: Path) -> str:
    """The assertion of ggml that ended the process, or the last line."""
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return next((line for line in reversed(lines) if "GGML_ASSERT" in line), lines[-1] if lines else "")[-200:]


if __name__ == "__main__":
    main()
