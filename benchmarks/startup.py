"""Seconds until `edgespec --help` has answered and until `import edgespec` is done, measured as whole processes.

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
    """Time `edgespec --help`, `import edgespec` and an empty Python program."""
    commands = {
        "help_s": [str(Path(sys.executable).with_name("edgespec")), "--help"],
        "import_s": [sys.executable, "-c", "import edgespec"],
        "bare_python_s": [sys.executable, "-c", "pass"],
    }
    print_result("startup", {name: measure_process(command, repeats) for name, command in commands.items()})


if __name__ == "__main__":
    main()
