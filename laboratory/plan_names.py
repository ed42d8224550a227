"""`edgespec plan NAME` for names of models.toml of different shapes, against a hub on this machine.

    uv run python -m laboratory.plan_names [NAME ...] [--threads 1] [--no-speed]

The hub serves files with the headers and lengths of the published ones (laboratory.published) and holes for weights;
a length that is 1% from the published one is an error.
The real command runs as a process of its own. Whether it asks for more than headers is checked: of each file it may ask
for the header and one block of the reader beyond. stdout ends with one JSON line: bytes needed, whether they fit, plain
tokens/s, and the bytes that were asked of the hub and sent by it, by file.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import click

from benchmarks.machine import describe
from edgespec.formats.gguf_reader import LARGEST_BLOCK
from edgespec.planner.report import table
from laboratory.published import Published
from laboratory.published_files import FILES
from tests.hub.hubserver import HubServer

COMMAND = [sys.executable, "-c", "from edgespec.cli.main import main; main()"]
KEPT = ("needed_bytes", "free_bytes", "fits", "plain_tokens_per_second", "speedup_at_acceptance", "not_foretold")


def write(file: Published, root: Path) -> int:
    """Write `file`; returns where its data begin (bytes). Raises click.ClickException where its size is another."""
    start = file.write(root)
    size = (root / file.repo / file.path).stat().st_size
    if abs(size / (file.gigabytes * 1e9) - 1) > 0.01:
        raise click.ClickException(f"{file.path} came out at {size / 1e9:.2f} GB, published are {file.gigabytes}.")
    return start


def plan(name: str, arguments: list[str], hub: str, folder: Path) -> dict[str, Any]:
    """What the command tells of `name` on the hub at this address. Raises click.ClickException where it fails."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "EDGESPEC_"))}
    environment |= {"HF_ENDPOINT": hub, "HF_HOME": str(folder / "hf"), "EDGESPEC_CONFIG_DIR": str(folder / "config")}
    command = [*COMMAND, "plan", name, "--json", "--backend", "llamacpp", *arguments]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    click.echo(child.stderr, err=True, nl=False)
    if child.returncode:
        raise click.ClickException(f"plan {name} ended with {child.returncode}.")
    facts: dict[str, Any] = json.loads(child.stdout)
    return facts


def read_from_hub(server: HubServer, file: Published, start: int) -> dict[str, int]:
    """Bytes of `file` asked for and sent, whose data begin at `start`. Raises click.ClickException if too many."""
    asked = sent = 0
    for request in server.downloads(re.escape(file.path)):
        span = re.fullmatch(r"bytes=(\d+)-(\d+)", request.range or "")
        if span is None or int(span[2]) >= start + LARGEST_BLOCK:
            raise click.ClickException(f"plan asked for {request.range or 'all'} of {file.path}: more than its header.")
        asked += int(span[2]) - int(span[1]) + 1
        sent += request.sent
    return {"header": start, "asked": asked, "sent": sent}


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(list(FILES)))
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True)
@click.option("--no-speed", is_flag=True, help="Leave out the measurements.")
def main(names: tuple[str, ...], threads: int, no_speed: bool) -> None:
    """Plan NAMES, or all."""
    arguments = ["--threads", str(threads), *(["--no-speed"] if no_speed else [])]
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="edgespec-") as folder:
        root = Path(folder) / "served"
        for name in names or FILES:
            starts = [write(file, root) for file in FILES[name]]
            with HubServer(root) as server:
                began = perf_counter()
                facts = plan(name, arguments, server.url, Path(folder))
                seconds = perf_counter() - began
                asked = {
                    file.path: read_from_hub(server, file, start)
                    for file, start in zip(FILES[name], starts, strict=True)
                }
            click.echo("\n".join(table(facts)))
            total = sum(each["sent"] for each in asked.values())
            click.echo(f"  {total / 2**20:.1f} MiB read from the hub; {seconds:.0f} s\n")
            found[name] = {key: facts[key] for key in KEPT if key in facts} | {"hub": asked, "seconds": round(seconds)}
    click.echo(json.dumps({"benchmark": "plan_names", "names": found, **describe()}))


if __name__ == "__main__":
    main()
