"""Seconds until `edgespec --help` has answered, as a whole process.

    uv run python -m benchmarks.startup [--repeats 15]

stdout ends with one JSON line.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from time import perf_counter

import click

from benchmarks.machine import describe


def whole_process(command: list[str], repeats: int) -> float:
    """Median seconds, after one run that fills the file cache and writes the bytecode, as an installation has it."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    times = []
    for _ in range(repeats + 1):
        started = perf_counter()
        subprocess.run(command, capture_output=True, check=True, env=environment)
        times.append(perf_counter() - started)
    return statistics.median(times[1:])


@click.command()
@click.option("--repeats", default=15, show_default=True)
def main(repeats: int) -> None:
    result = {
        "benchmark": "startup",
        "help_s": round(whole_process([str(Path(sys.executable).with_name("edgespec")), "--help"], repeats), 4),
        "bare_python_s": round(whole_process([sys.executable, "-c", "pass"], repeats), 4),
        **describe(),
    }
    click.echo(json.dumps(result))


if __name__ == "__main__":
    main()
