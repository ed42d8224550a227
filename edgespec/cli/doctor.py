"""`edgespec doctor`: this machine, its runtimes and devices, what is missing, and the command that fixes it.

Works with no runtime installed: runtimes are probed in a child process, which may crash without harm.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from typing import Any

import click

_PROBE_S = 60
_PROBE = """
import json
from dataclasses import asdict
from edgespec.backends.llamacpp.library import library
lib = library()
print(json.dumps({"devices": [asdict(d) for d in lib.devices()],
                  "gpu_offload": bool(lib.api.llama_supports_gpu_offload()),
                  "features": lib.api.llama_print_system_info().decode()}))
"""

_MLX_PROBE = """
import json
from edgespec.backends.mlx.library import device
found = device()
print(json.dumps({"devices": [{"kind": "gpu" if found.on_gpu else "cpu", "name": "MLX", "description": found.name,
                               "free": found.working_set, "total": found.working_set}]}))
"""


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout.")
def doctor_command(as_json: bool) -> int:
    """Check this machine. The exit code is 1 when nothing here can run a model."""
    report = {"machine": _machine(), "runtimes": {"llamacpp": _llamacpp(), "mlx": _mlx()}, "cache": _cache()}
    problems = _problems(report)
    if as_json:
        click.echo(json.dumps({**report, "problems": problems}, ensure_ascii=False))
    else:
        _print(report, problems)
    return 1 if all(runtime["state"] != "works" for runtime in report["runtimes"].values()) else 0


def _machine() -> dict[str, Any]:
    import platform

    import psutil

    from edgespec.backends.options import physical_cores

    memory = psutil.virtual_memory()
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "cores": physical_cores(),
        "busy_cores": round(psutil.cpu_percent(interval=0.2) / 100 * (os.cpu_count() or 1), 1),
        "ram_bytes": memory.total,
        "ram_available_bytes": memory.available,
    }


def _version(package: str) -> str | None:
    import importlib.metadata

    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _llamacpp() -> dict[str, Any]:
    version = _version("llama-cpp-python")
    if version is None:
        return {"state": "missing", "fix": "pip install llama-cpp-python"}
    return {"version": version, **_tried(_PROBE, _REINSTALL)}


_REINSTALL = "pip install --force-reinstall --no-cache-dir llama-cpp-python"


def _mlx() -> dict[str, Any]:
    import platform

    version = _version("mlx-lm")
    if version is not None:
        return {"version": version, **_tried(_MLX_PROBE, "pip install --upgrade mlx-lm")}
    if platform.system() == "Darwin" and platform.machine() == "arm64":
        return {"state": "missing", "fix": "pip install mlx-lm"}
    return {"state": "unsupported", "reason": "MLX is for Apple Silicon"}


def _tried(program: str, fix: str) -> dict[str, Any]:
    """What a runtime says of itself in a process of its own, which it may end."""
    import subprocess

    try:
        child = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=_PROBE_S, check=False
        )
    except subprocess.TimeoutExpired:
        return {"state": "broken", "reason": f"no answer in {_PROBE_S} s", "fix": fix}
    if child.returncode != 0:
        lines = child.stderr.strip().splitlines()
        return {
            "state": "broken",
            "reason": lines[-1] if lines else f"it died with code {child.returncode}",
            "fix": fix,
        }
    return {"state": "works", **json.loads(child.stdout.splitlines()[-1])}


def _cache() -> dict[str, Any]:
    from edgespec.conversations.database import folder
    from edgespec.hub.hub import Hub
    from edgespec.registry.schema import config_dir

    hub = Hub.from_environment()
    existing = hub.cache_dir
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    return {
        "path": str(hub.cache_dir),
        "endpoint": hub.endpoint,
        "offline": hub.offline,
        "free_bytes": shutil.disk_usage(existing).free,
        "writable": existing.is_dir() and os.access(existing, os.W_OK),
        "config": str(config_dir()),
        "conversations": str(folder()),
    }


def _problems(report: dict[str, Any]) -> list[dict[str, str]]:
    problems = []
    for title, name in (("llama.cpp", "llamacpp"), ("MLX", "mlx")):
        runtime = report["runtimes"][name]
        if runtime["state"] in ("missing", "broken"):
            told = "is not installed" if runtime["state"] == "missing" else f"does not work: {runtime['reason']}"
            problems.append({"problem": f"{title} {told}", "fix": runtime["fix"]})
    llama = report["runtimes"]["llamacpp"]
    if (
        llama["state"] == "works"
        and not llama["gpu_offload"]
        and (shutil.which("nvidia-smi") or shutil.which("rocminfo"))
    ):
        flag = "-DGGML_CUDA=on" if shutil.which("nvidia-smi") else "-DGGML_HIP=on"
        problems.append(
            {
                "problem": "there is a GPU, but llama.cpp was built without support for it",
                "fix": f'CMAKE_ARGS="{flag}" {_REINSTALL}',
            }
        )
    if not report["cache"]["writable"]:
        problems.append(
            {"problem": f"the model cache {report['cache']['path']} cannot be written", "fix": "set HF_HOME"}
        )
    return problems


def _print(report: dict[str, Any], problems: list[dict[str, str]]) -> None:
    from edgespec.units import gib

    machine, cache = report["machine"], report["cache"]
    click.echo(f"machine    {machine['system']}, Python {machine['python']}")
    click.echo(f"cores      {machine['cores']} for computing, {machine['busy_cores']} busy now")
    click.echo(f"memory     {gib(machine['ram_available_bytes'])} of {gib(machine['ram_bytes'])} available")
    for name, runtime in report["runtimes"].items():
        version = f" {runtime['version']}" if runtime.get("version") else ""
        reason = f" ({runtime['reason']})" if runtime.get("reason") else ""
        click.echo(f"{name:10} {runtime['state']}{version}{reason}")
        for device in runtime.get("devices", ()):
            memory = f", {gib(device['free'])} of {gib(device['total'])} free" if device["kind"] != "cpu" else ""
            click.echo(f"           {device['kind']} {device['name']}: {device['description']}{memory}")
    offline = ", offline" if cache["offline"] else ""
    click.echo(f"models     {cache['path']}, {gib(cache['free_bytes'])} free{offline}")
    click.echo(f"config     {cache['config']}")
    click.echo(f"chats      {cache['conversations']}")
    for problem in problems:
        click.echo(f"\nproblem: {problem['problem']}\nfix:     {problem['fix']}")
    if not problems:
        click.echo("\nEverything needed is here. Try: edgespec chat")
