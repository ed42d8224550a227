"""Seconds until `edgespec --help` has answered, measured as a whole process.

    uv run python -m benchmarks.startup [--repeats 15]

Medians, after one run that fills the file cache and writes the bytecode. stdout ends with one JSON line.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

import click

from benchmarks.harness import print_result


def measure_process(command: Sequence[str], repeats: int) -> float:
    """Median seconds of `command`, rounded to 0.1 ms. Raises CalledProcessError."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    times = []
    for _ in range(repeats + 1):
        start_s = perf_counter()
        subprocess.run(command, capture_output=True, check=True, env=environment)
        times.append(perf_counter() - start_s)
    return round(statistics.median(times[1:]), 4)


@click.command()
@click.option("--repeats", type=click.IntRange(1), default=15, show_default=True)
def main(repeats: int) -> None:
    """Time `edgespec --help` and an empty Python program."""
    help_s = measure_process([str(Path(sys.executable).with_name("edgespec")), "--help"], repeats)
    print_result(
        "startup", {"help_s": help_s, "bare_python_s": measure_process([sys.executable, "-c", "pass"], repeats)}
    )


if __name__ == "__main__":
    main()
