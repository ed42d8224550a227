"""`edgespec doctor`: report this machine, its runtimes and devices, and commands that fix problems.

Runtimes are probed in child processes, so that a crash of one does no harm. No runtime has to be installed.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from time import monotonic
from typing import Any

import click

from edgespec.cli.options import json_option
from edgespec.cli.output import print_result
from edgespec.cli.terminal import report_activity
from edgespec.errors import Cancelled, reason_of
from edgespec.installation import install_command
from edgespec.units import gib

_PROBE_S = 60
_GPU_REPORT = Path("edgespec-gpu.json")
_FREE_BYTES = 2**20  # with less a disk counts as full


def _probe_llamacpp() -> dict[str, Any]:
    from edgespec.backends.llamacpp.library import library

    lib = library()
    found = lib.devices()
    return {
        "devices": [asdict(each) for each in found],
        "gpu_offload": any(each.is_gpu for each in found),
        "workers": bool(lib.api.llama_supports_rpc()),
        "features": lib.api.llama_print_system_info().decode(),
    }


def _probe_mlx() -> dict[str, Any]:
    from edgespec.backends.mlx.library import device, load_mlx

    found, distributed = device(), load_mlx().distributed
    kind, size = "gpu" if found.on_gpu else "cpu", found.working_set
    return {
        "distributed": [name for name in ("ring", "jaccl") if distributed.is_available(name)],
        "devices": [{"kind": kind, "name": "MLX", "description": found.name, "free": size, "total": size}],
    }


# By runtime: its title, its package, and what examines it in a process of its own.
_RUNTIMES = {
    "llamacpp": ("llama.cpp", "llama-cpp-python", _probe_llamacpp),
    "mlx": ("MLX", "mlx-lm", _probe_mlx),
}


@click.command("doctor")
@click.option("--gpu", is_flag=True, help="Decode on the device too, and write the figures to edgespec-gpu.json.")
@json_option
def doctor_command(gpu: bool, as_json: bool) -> int:
    """Check this machine. The exit code is 1 if no runtime works.

    With --gpu, the embedded pair decodes with its layers, draft and cache in several places, in one or two minutes. The
    answers have to be those of plain decoding and of the processor; the exit code is 1 if they are not. The file has
    no texts and no paths, and can be attached to an issue.
    """
    report: dict[str, Any] = {}
    for title, text in _examine(report):
        report_activity("")
        if not as_json:
            click.echo(f"{title:10} {text}")
    if gpu:
        _check_gpu(report, as_json=as_json)
    problems = list(_find_problems(report))
    lines = [f"\nproblem: {each['problem']}\nfix:     {each['fix']}" for each in problems]
    none = ["\nNo problems found. Try: edgespec chat"]
    print_result({**report, "problems": problems}, lines or none, as_json=as_json)
    is_sound = all(check["is_sound"] for check in report.get("gpu", ()))
    return int(all(runtime["state"] != "works" for runtime in report["runtimes"].values()) or not is_sound)


def _check_gpu(report: dict[str, Any], *, as_json: bool) -> None:
    """Add the checks of devices to `report`, print them, and keep edgespec-gpu.json up to date, since a device may end
    this process.
    """
    from edgespec.cli.gpu_check import check_places

    shown = ("version", "state", "devices", "gpu_offload", "features")
    runtimes = {
        name: {key: runtime[key] for key in shown if key in runtime} for name, runtime in report["runtimes"].items()
    }
    machine = {name: value for name, value in report["machine"].items() if name != "busy_cores"}
    checks: list[dict[str, Any]] = []
    report["gpu"] = checks
    folders = {str(Path.home()): "~", sys.prefix: "PREFIX"}

    def write(running: str | None) -> None:
        text = json.dumps({"machine": machine, "runtimes": runtimes, "gpu": checks, "running": running}, indent=1)
        for folder, name in folders.items():
            text = text.replace(json.dumps(folder)[1:-1], name)
        _GPU_REPORT.write_text(f"{text}\n", encoding="utf-8")

    kinds = {device["kind"] for runtime in runtimes.values() for device in runtime.get("devices", ())}
    if not kinds & {"gpu", "igpu"}:
        click.echo("note: No runtime finds a GPU here, so the processor is checked.", err=True)
    for check in check_places([name for name, runtime in runtimes.items() if runtime["state"] == "works"], write):
        checks.append(check.describe())
        if not as_json:
            click.echo(f"{check.backend:10} {check.format()}")
    write(None)


def _examine(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Fill in `report`, and return each of its lines, a title and a text, as soon as it is known."""
    report_activity("measuring the load of the processor …")
    machine = report["machine"] = _describe_machine()
    yield "machine", f"{machine['system']}, Python {machine['python']}"
    yield "cores", f"{machine['cores']} physical, {os.cpu_count()} logical, load {machine['busy_cores']}"
    yield "memory", f"{gib(machine['ram_available_bytes'])} of {gib(machine['ram_bytes'])} available"
    pages = report["huge_pages"] = describe_huge_pages()
    if pages:
        yield "huge pages", f"{pages['mode']}{', left to GLIBC_TUNABLES' if pages['set_by_user'] else ''}"
    report_activity("loading drafters …")
    report["drafters"] = _describe_drafters()
    for i, drafter in enumerate(report["drafters"]):
        words = ", ".join(drafter.get("words", [drafter["name"]]))
        package = f" ({drafter['package']})" if drafter["package"] != "edgespec" else ""
        yield "" if i else "drafters", f"{words}{package}: {drafter.get('summary', 'refused')}"
    cache = report["cache"] = _describe_cache()
    yield "models", f"{cache['path']}, {gib(cache['free_bytes'])} free{', offline' if cache['offline'] else ''}"
    yield "config", cache["config"]
    yield "chats", cache["conversations"]
    yield "texts", f"{cache['memory']['path']}, {cache['memory']['state']}"
    report["runtimes"] = {}
    for name, (title, *_) in _RUNTIMES.items():  # they take the longest, so they come last
        report_activity(f"loading {title} in a process of its own …")
        runtime = report["runtimes"][name] = _check_runtime(name)
        yield from _format_runtime(name, runtime)


def _describe_machine() -> dict[str, Any]:
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


def _check_runtime(name: str) -> dict[str, Any]:
    from edgespec.backends.llamacpp.library import rebuild_command
    from edgespec.cancel import cancellable
    from edgespec.isolated import ChildDied, run_in_child

    def check() -> None:
        if monotonic() > until_s:
            raise Cancelled

    _, package, probe = _RUNTIMES[name]
    until_s = monotonic() + _PROBE_S
    try:
        with cancellable(check):
            return {"version": importlib.metadata.version(package), "state": "works", **run_in_child(probe)}
    except importlib.metadata.PackageNotFoundError:
        if name == "mlx" and (platform.system(), platform.machine()) != ("Darwin", "arm64"):
            return {"state": "unsupported", "reason": "MLX is for Apple Silicon"}
        return {"state": "missing", "fix": install_command(package)}
    except ChildDied:
        reason = "its process ended"
    except Cancelled:
        reason = f"no answer in {_PROBE_S} s"
    except Exception as error:  # noqa: BLE001 - whatever a damaged installation raises
        reason = reason_of(error)
    fix = rebuild_command() if name == "llamacpp" else install_command(package, "--upgrade")
    return {"state": "broken", "reason": reason, "fix": fix}


def describe_huge_pages() -> dict[str, Any] | None:
    """How the kernel gives huge pages; None if it has none."""
    from edgespec.machines.huge_pages import HUGE_PAGES, is_set_by_user, read_mode

    mode = read_mode(HUGE_PAGES)
    return None if mode is None else {"mode": mode, "set_by_user": is_set_by_user()}


def find_huge_page_problems(huge_pages: dict[str, Any] | None) -> list[dict[str, str]]:
    """What keeps weights out of huge pages, unless the user has decided about them."""
    from edgespec.machines.huge_pages import HUGE_PAGES

    if huge_pages is None or huge_pages["mode"] != "never" or huge_pages["set_by_user"]:
        return []
    problem = "huge pages are off, so models whose weights are repacked or read, not mapped, decode more slowly"
    return [{"problem": problem, "fix": f"echo madvise | sudo tee {HUGE_PAGES / 'enabled'}"}]


def _describe_memory() -> dict[str, Any]:
    """The path of the user's memory, its state in words, and how many tokens and bytes it has if there is one."""
    from edgespec.errors import CacheError
    from edgespec.folders import memory_folder
    from edgespec.memory.administration import TextStore

    folder = memory_folder()
    if not folder.is_dir():
        return {"path": str(folder), "state": "nothing is kept yet"}
    try:
        with closing(TextStore.open(folder)) as store:
            tokens, n_bytes = sum(each.n_tokens for each in store.status()), store.size()
    except CacheError as error:
        return {"path": str(folder), "state": f"cannot be used: {error.message}"}
    return {"path": str(folder), "state": f"{tokens:,} tokens in {gib(n_bytes)}", "tokens": tokens, "bytes": n_bytes}


def _describe_cache() -> dict[str, Any]:
    from edgespec.autopilot.store import calibration_folder
    from edgespec.folders import data_folder
    from edgespec.models.hub import Hub
    from edgespec.models.registry import config_dir

    hub = Hub.from_environment()
    own = {"config": config_dir(), "conversations": data_folder(), "measurements": calibration_folder()}
    return {
        "path": str(hub.cache_dir),
        "endpoint": hub.endpoint,
        "offline": hub.offline,
        "free_bytes": shutil.disk_usage(_find_existing(hub.cache_dir)).free,
        "writable": _can_write(hub.cache_dir),
        **{name: str(folder) for name, folder in own.items()},
        "unwritable": [str(folder) for folder in own.values() if not _can_write(folder)],
        "memory": _describe_memory(),
    }


def _find_existing(folder: Path) -> Path:
    """The folder, or the lowest one above it that is there."""
    return next(each for each in (folder, *folder.parents) if each.exists())


def _can_write(folder: Path) -> bool:
    """Whether files can be written into the folder, which is made if it is missing."""
    there = _find_existing(folder)
    return there.is_dir() and os.access(there, os.W_OK) and shutil.disk_usage(there).free > _FREE_BYTES


def _describe_drafters() -> list[dict[str, Any]]:
    """All drafters with the package of each, then the entry points that were refused, with the reason."""
    from edgespec.drafters.registry import GROUP, drafter_specs, refused_plugins
    from edgespec.models.draft_words import format_word, list_words

    refused = refused_plugins()
    packages: dict[str, str] = {}
    lost: list[dict[str, Any]] = []
    for entry in importlib.metadata.entry_points(group=GROUP):
        package = entry.dist.name if entry.dist is not None else entry.value
        if entry.name in refused:
            lost.append({"name": entry.name, "package": package, "refused": refused[entry.name]})
        else:
            value = entry.load()
            packages |= {spec.name: package for spec in (value if isinstance(value, list | tuple) else (value,))}
    registered = [
        {
            "name": spec.name,
            "words": [format_word(word, of) for word, of in list_words() if of.name == spec.name],
            "summary": spec.summary,
            "package": packages.get(spec.name, "edgespec"),
        }
        for spec in drafter_specs().values()
    ]
    return registered + lost


def _find_problems(report: dict[str, Any]) -> Iterator[dict[str, str]]:
    for name, (title, *_) in _RUNTIMES.items():
        runtime = report["runtimes"][name]
        if runtime["state"] in ("missing", "broken"):
            state = "is not installed" if runtime["state"] == "missing" else f"does not work: {runtime['reason']}"
            yield {"problem": f"{title} {state}", "fix": runtime["fix"]}
    llama = report["runtimes"]["llamacpp"]
    if llama["state"] == "works" and not llama["gpu_offload"]:
        yield from find_gpu_problems()
    yield from find_huge_page_problems(report["huge_pages"])
    for drafter in report["drafters"]:
        if "refused" in drafter:
            problem = f"the drafter {drafter['name']} is refused: {drafter['refused']}"
            yield {"problem": problem, "fix": install_command(drafter["package"], "--upgrade")}
    for check in report.get("gpu", ()):
        if not check["is_sound"]:
            problem = f"{check['backend']} computes otherwise with {check['place']}, or not at all"
            yield {"problem": problem, "fix": f"update the driver, or report it with {_GPU_REPORT}; --gpu-layers 0"}
    if not report["cache"]["writable"]:
        yield {"problem": f"the model cache {report['cache']['path']} is not writable", "fix": "set HF_HOME"}
    for folder in report["cache"]["unwritable"]:
        problem = f"{folder} cannot be written, or its disk is full: nothing is kept there"
        yield {"problem": problem, "fix": "change its permissions, or free some space"}


def find_gpu_problems() -> Iterator[dict[str, str]]:
    """Why llama.cpp finds no GPU, if it was built for one, or this machine has the tools of one."""
    from edgespec.autopilot.store import list_builds
    from edgespec.backends.llamacpp.library import rebuild_command

    tools = {"nvidia-smi": "-DGGML_CUDA=on", "rocminfo": "-DGGML_HIP=on"}
    flag = next((flag for tool, flag in tools.items() if shutil.which(tool)), None)
    if (built := list_builds().strip(" ()")) not in ("", "blas"):
        problem = f"llama.cpp was built for a GPU ({built}) and finds none"
        yield {"problem": problem, "fix": "check its driver, and that this user may open the device"}
    elif flag is not None:
        problem = "this machine has a GPU, but llama.cpp was built without GPU support"
        yield {"problem": problem, "fix": rebuild_command(flag)}


def _format_runtime(name: str, runtime: dict[str, Any]) -> Iterator[tuple[str, str]]:
    version = f" {runtime['version']}" if runtime.get("version") else ""
    reason = f" ({runtime['reason']})" if runtime.get("reason") else ""
    yield name, f"{runtime['state']}{version}{reason}"
    for device in runtime.get("devices", ()):
        memory = f", {gib(device['free'])} of {gib(device['total'])} free" if device["kind"] != "cpu" else ""
        yield "", f"{device['kind']} {device['name']}: {device['description']}{memory}"
    if "workers" in runtime:
        from edgespec.backends.llamacpp.library import rebuild_command
        from edgespec.backends.llamacpp.rpc import BUILD_SETTING

        possible = "possible: `edgespec worker` lends this machine, --workers uses others"
        missing = f"not in this build of llama.cpp; to add them: {rebuild_command(BUILD_SETTING)}"
        yield "workers", possible if runtime["workers"] else missing
    if names := runtime.get("distributed"):
        yield "ranks", f"possible with mlx.launch ({', '.join(names)})"
