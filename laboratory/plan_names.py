"""`edgespec plan NAME` for names of models.toml of different architectures, against a hub on this machine.

    uv run python -m laboratory.plan_names [NAME ...] [--threads 1] [--no-speed]

The hub serves files with the headers and lengths of the published ones and holes for weights (laboratory.published). A
length that differs by more than 1% from the published one is an error. The real command runs as a process. It may ask
for each file's header and one block of the reader beyond it; more is an error. stdout ends with one JSON line: bytes
needed, whether they fit, plain tokens/s, and by file the bytes asked of the hub and sent by it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from time import perf_counter
from typing import Any

import click

from benchmarks.harness import EDGESPEC, print_result
from edgespec.formats.gguf import LARGEST_BLOCK
from edgespec.models.report import format_plan
from laboratory.hub import OutlineHub, RangeRequest
from laboratory.published import PublishedFile
from laboratory.published_files import FILES

KEYS = ("needed_bytes", "free_bytes", "fits", "plain_tokens_per_second", "speedup_at_acceptance", "not_foretold")
MAX_SIZE_ERROR = 0.01


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(list(FILES)))
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True)
@click.option("--no-speed", is_flag=True, help="Leave out the measurements.")
def main(names: tuple[str, ...], threads: int, no_speed: bool) -> None:
    """Plan NAMES, or all."""
    arguments = ["--threads", str(threads), *(["--no-speed"] if no_speed else [])]
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="edgespec-") as folder:
        root = Path(folder) / "served"
        for name in names or FILES:
            starts = [write_outline(file, root) for file in FILES[name]]
            with OutlineHub(root) as hub:
                start_s = perf_counter()
                plan = run_plan(name, arguments, hub.url, Path(folder))
                seconds = perf_counter() - start_s
                traffic = {
                    file.path: count_traffic(hub.requests, file, start)
                    for file, start in zip(FILES[name], starts, strict=True)
                }
            sent = sum(each["sent"] for each in traffic.values())
            click.echo(
                "\n".join([*format_plan(plan), f"  {sent / 2**20:.1f} MiB from the hub; {seconds:.0f} s"]), err=True
            )
            results[name] = {key: plan[key] for key in KEYS if key in plan} | {
                "hub": traffic,
                "seconds": round(seconds),
            }
    print_result("plan_names", {"names": results})


def write_outline(file: PublishedFile, root: Path) -> int:
    """Write `file`; returns where its data begins (bytes). Raises click.ClickException where its size is wrong."""
    start = file.write(root)
    size = (root / file.repo / file.path).stat().st_size
    if abs(size / (file.gigabytes * 1e9) - 1) > MAX_SIZE_ERROR:
        raise click.ClickException(f"{file.path} has {size / 1e9:.2f} GB instead of the published {file.gigabytes}.")
    return start


def run_plan(name: str, arguments: list[str], hub: str, folder: Path) -> dict[str, Any]:
    """The JSON of `edgespec plan` for `name` on the hub at this address. Raises click.ClickException where it fails."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "EDGESPEC_"))}
    environment |= {"HF_ENDPOINT": hub, "HF_HOME": str(folder / "hf"), "EDGESPEC_CONFIG_DIR": str(folder / "config")}
    command = [*EDGESPEC, "plan", name, "--json", "--backend", "llamacpp", *arguments]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    click.echo(child.stderr, err=True, nl=False)
    if child.returncode:
        raise click.ClickException(f"edgespec plan {name} failed with exit code {child.returncode}.")
    plan: dict[str, Any] = json.loads(child.stdout)
    return plan


def count_traffic(requests: Iterable[RangeRequest], file: PublishedFile, start: int) -> dict[str, int]:
    """Bytes of `file` asked for and sent; its data begins at `start`. Raises click.ClickException if too many."""
    asked = sent = 0
    for request in requests:
        if request.path != file.path:
            continue
        span = re.fullmatch(r"bytes=(\d+)-(\d+)", request.range or "")
        if span is None or int(span[2]) >= start + LARGEST_BLOCK:
            raise click.ClickException(
                f"plan asked for {request.range or 'all'} of {file.path}, which is more than its header."
            )
        asked += int(span[2]) - int(span[1]) + 1
        sent += request.sent
    return {"header": start, "asked": asked, "sent": sent}


if __name__ == "__main__":
    main()
