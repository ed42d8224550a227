"""`edgespec doctor`, `show`, `list`, `completion`, `--version`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgespec.backends.llamacpp.library import rebuild_command
from edgespec.cli import gpu_check
from edgespec.cli.doctor import _format_runtime, describe_huge_pages, find_gpu_problems, find_huge_page_problems
from edgespec.cli.gpu_check import PlaceCheck
from edgespec.drafters import registry
from edgespec.installation import install_command
from edgespec.machines.huge_pages import HUGE_PAGES
from tests.cli.conftest import COMMAND, Cli
from tests.gguf_models import REPOSITORY

HEADS = [name for name, spec in registry.drafter_specs().items() if spec.needs == "head"]
WORDS = ["ngram", "suffix", "recycling", "lookahead", "model", *HEADS, "pard", "layerskip", "qspec", "sparse"]


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Installed packages: `other` adds a drafter; those of `broken` and `thief` are refused."""
    folder = tmp_path / "packages"
    folder.mkdir()
    (folder / "other.py").write_text(
        "from edgespec.drafters import DrafterSpec\n"
        "from edgespec.drafters.ngram import NgramDrafter\n"
        "SPEC = DrafterSpec('automaton', 'what followed the longest match', lambda resources: NgramDrafter())\n"
        "THIEF = DrafterSpec('ngram', 'a name that is taken', lambda resources: NgramDrafter())\n"
    )
    entries = {"other": "automaton = other:SPEC", "broken": "bad = other:MISSING", "thief": "copy = other:THIEF"}
    for package, entry in entries.items():
        info = folder / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[edgespec.drafters]\n{entry}\n")
    with monkeypatch.context() as installed:
        installed.syspath_prepend(folder)
        registry._installed.cache_clear()
        yield
    registry._installed.cache_clear()


def test_doctor_reports_the_machine_its_runtimes_and_its_drafters(cli: Cli, plugins: None, tmp_path: Path) -> None:
    run = ("run", "def f(x):", "--max-tokens", "8", "--temperature", "0", "--threads", "1", "--json")
    names = json.loads(cli(*run).stdout)["draft"].split("+")
    assert names[0] == "ngram" and names[-2:] == ["package:python-6m/draft.gguf", "automaton"]
    assert json.loads(cli(*run, "--draft", "ngram+automaton").stdout)["draft"] == "ngram+automaton"
    assert f"Drafters: {', '.join(WORDS)}, automaton." in cli("run", "x", "--draft", "automatn").stderr

    done, shown = cli("doctor", "--json"), cli("doctor", GLIBC_TUNABLES="glibc.malloc.hugetlb=0").stdout
    report = json.loads(done.stdout)
    assert done.returncode == 0 and report["machine"]["ram_bytes"] > 2**30
    llamacpp, mlx = (report["runtimes"][name] for name in ("llamacpp", "mlx"))
    assert (llamacpp["state"], mlx["state"]) == ("works", "works")
    assert any(device["kind"] == "cpu" for device in llamacpp["devices"])
    assert llamacpp["gpu_offload"] == any(device["kind"] in ("gpu", "igpu") for device in llamacpp["devices"])
    assert "\nworkers    possible: `edgespec worker`" in shown
    assert f"\ntexts      {tmp_path / 'data' / 'memory'}, " in shown
    if (pages := report["huge_pages"]) is not None:
        assert f"[{pages['mode']}]" in (HUGE_PAGES / "enabled").read_text() and not pages["set_by_user"]
        assert f"\nhuge pages {pages['mode']}, left to GLIBC_TUNABLES\n" in shown

    found = {each["name"]: each for each in report["drafters"]}
    assert [*found][:-2] == [*registry.drafter_specs()]
    assert all(found[name]["package"] == "edgespec" for name in ("ngram", "self"))
    assert found["self"]["words"] == ["layerskip[:K]", "qspec[:BITS]", "sparse[:SINK,WINDOW]"]
    summary = "what followed the longest match"
    assert found["automaton"] == {"name": "automaton", "words": ["automaton"], "summary": summary, "package": "other"}
    assert found["bad"]["package"] == "broken" and "MISSING" in found["bad"]["refused"]
    assert found["copy"] == {"name": "copy", "package": "thief", "refused": "the name 'ngram' is taken"}
    assert {install_command(name, "--upgrade") for name in ("broken", "thief")} <= {
        problem["fix"] for problem in report["problems"]
    }
    assert f"drafters   ngram: {found['ngram']['summary']}\n           suffix: " in shown
    assert f"automaton (other): {summary}" in shown
    assert "problem: the drafter copy is refused: the name 'ngram' is taken" in shown


def test_doctor_decodes_on_the_device_and_writes_a_report(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = {"default": {"threads": 1}, "a quantized cache": {"threads": 1, "kv_type": "q8_0"}}
    monkeypatch.setattr(gpu_check, "PLACES", {"llamacpp": places})
    done = cli("doctor", "--gpu")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "edgespec-gpu.json").read_text(encoding="utf-8"))
    assert [each["place"] for each in report["gpu"]] == list(places)
    for each in report["gpu"]:
        assert each["is_sound"] and each["drafted"] >= each["answers"] == 4 and each["step_ms"]["1"] > 0
        assert (each["as_on_host"] is None) == (each["place"] == "a quantized cache")
        assert f"{each['place']}: " in done.stdout
    assert str(tmp_path) not in json.dumps(report), "it is for others to read"


@pytest.mark.parametrize(
    ("figures", "is_sound"),
    [
        ({"as_plain": 4, "drafted": 4, "widest_gap": 0.4}, True),
        ({"as_plain": 3, "drafted": 4}, False),
        ({"as_plain": 4, "drafted": 4, "widest_gap": 0.6}, False),
        ({"error": "no memory."}, False),
    ],
)
def test_a_place_is_sound_or_not(figures: dict[str, Any], is_sound: bool) -> None:
    check = PlaceCheck("llamacpp", "default", 6, 6, **figures)
    assert check.is_sound == is_sound == check.describe()["is_sound"]
    assert ("DIFFERENT" in check.format() or "no memory" in check.format()) == (not is_sound)


def test_doctor_knows_how_the_kernel_gives_huge_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    monkeypatch.setattr("edgespec.machines.huge_pages.HUGE_PAGES", tmp_path)
    assert describe_huge_pages() is None and find_huge_page_problems(None) == []
    for modes in ("[always] madvise never", "always [madvise] never", "always madvise [never]"):
        (tmp_path / "enabled").write_text(f"{modes}\n")
        found = describe_huge_pages()
        assert found is not None and f"[{found['mode']}]" in modes and not found["set_by_user"]
        problems = find_huge_page_problems(found)
        assert len(problems) == (found["mode"] == "never")
    assert "huge pages are off" in problems[0]["problem"]
    assert problems[0]["fix"] == f"echo madvise | sudo tee {tmp_path}/enabled"
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=0")
    found = describe_huge_pages()
    assert found is not None and found["set_by_user"] and find_huge_page_problems(found) == []


def test_doctor_and_run_without_a_runtime(cli: Cli, tmp_path: Path) -> None:
    """A path entry that hides both runtimes, as on a machine where the wheel of llama-cpp-python did not build."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, importlib.metadata as m\n"
        "real = m.version\n"
        "def version(name):\n"
        "    if name in ('llama-cpp-python', 'mlx-lm'): raise m.PackageNotFoundError(name)\n"
        "    return real(name)\n"
        "m.version = version\n"
        "sys.modules['llama_cpp'] = sys.modules['mlx'] = None\n"
    )
    hidden = {"PYTHONPATH": os.pathsep.join((str(tmp_path), str(REPOSITORY)))}
    done = cli("doctor", is_new=True, **hidden)
    assert done.returncode == 1 and "problem: llama.cpp is not installed\n" in done.stdout
    assert "pip install llama-cpp-python" in done.stdout
    for backend, package in (("llamacpp", "pip install llama-cpp-python"), ("mlx", "mlx-lm")):
        refused = cli("run", "x", "--backend", backend, is_new=True, **hidden)
        assert refused.returncode == 7 and package in refused.stderr


def test_doctor_survives_a_runtime_that_dies(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llama_cpp.py").write_text("import os\nos.abort()\n")
    (tmp_path / "mlx.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    done = cli("doctor")
    assert done.returncode == 1
    assert "problem: llama.cpp does not work: its process ended" in done.stdout and rebuild_command() in done.stdout
    assert "problem: MLX does not work: " in done.stdout


@pytest.mark.parametrize(
    ("built", "has_tool", "problem", "fix"),
    [
        ("", False, "", ""),
        (" (blas)", True, "llama.cpp was built without GPU support", "-DGGML_CUDA=on"),
        (" (vulkan)", True, "llama.cpp was built for a GPU (vulkan) and finds none", "check its driver"),
    ],
)
def test_why_no_gpu_is_found(
    built: str, has_tool: bool, problem: str, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if has_tool:
        (tmp_path / "nvidia-smi").touch(mode=0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("edgespec.autopilot.store.list_builds", lambda: built)
    found = [*find_gpu_problems()]
    assert len(found) == bool(problem) and all(problem in each["problem"] and fix in each["fix"] for each in found)


@pytest.mark.parametrize(
    ("folder", "file", "command"),
    [
        ("pipx/venvs/edgespec", "pyvenv.cfg", 'CMAKE_ARGS="$CMAKE_ARGS -DX=on" pipx runpip edgespec install '),
        ("edgespec", "uv-receipt.toml", 'CMAKE_ARGS="$CMAKE_ARGS -DX=on" uv tool upgrade edgespec '),
        ("edgespec", "pyvenv.cfg", 'CMAKE_ARGS="$CMAKE_ARGS -DX=on" uv pip install '),
        ("edgespec", "other", f'CMAKE_ARGS="$CMAKE_ARGS -DX=on" {sys.executable} -m pip install '),
    ],
)
def test_llama_cpp_is_built_again_as_it_was_installed(
    folder: str, file: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = tmp_path / folder
    prefix.mkdir(parents=True)
    (prefix / file).write_text("home = x\nuv = 0.9\n")
    monkeypatch.setattr(sys, "prefix", str(prefix))
    assert rebuild_command("-DX=on").startswith(command)
    assert rebuild_command() == rebuild_command("-DX=on").partition('" ')[2]


def test_doctor_says_how_to_add_workers() -> None:
    lines = dict(_format_runtime("llamacpp", {"state": "works", "workers": False}))
    assert lines["workers"].startswith("not in this build of llama.cpp; to add them: CMAKE_ARGS=")


def test_show_prices_the_embedded_target(cli: Cli) -> None:
    facts = json.loads(cli("show", "--json", "--ctx", "1024").stdout)
    assert (facts["architecture"], facts["layers"], facts["vocabulary"]) == ("llama", 6, 4096)
    assert facts["parameters"] == 5_770_496
    assert facts["kv_bytes"] == 6 * 2 * 2 * 64 * 2 * 1024  # layers, k and v, kv heads, head width, f16, tokens
    assert "5,770,496" in cli("show", "python-6m").stdout


def test_list_names_the_registry(cli: Cli) -> None:
    aliases = json.loads(cli("list", "--json").stdout)["aliases"]
    assert {"llama-70b-q4", "python-6m"} <= {each["name"] for each in aliases}
    embedded = aliases[0]
    assert embedded["here"] and embedded["fit"] == "fits" and not embedded["estimated"]
    shown = cli("list").stdout
    assert shown.split("\n")[0].split() == ["NAME", "SIZE", "FIT", "HERE", "DESCRIPTION"] and "edgespec pull" in shown
    assert "~4.5 GiB" in next(line for line in shown.splitlines() if line.startswith("llama-8b-q4"))


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_call_the_command(cli: Cli, shell: str) -> None:
    assert f"_EDGESPEC_COMPLETE={shell}_complete" in cli("completion", shell).stdout


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("ng", ["ngram"]),
        ("", ["auto", "none", *WORDS]),
        ("ngram+", [f"ngram+{name}" for name in WORDS[1:]]),
        ("ngram+layerskip:4+q", ["ngram+layerskip:4+qspec"]),
        ("./draft", ["file,./draft"]),
    ],
)
@pytest.mark.parametrize("command", ["run", "pull"])
def test_drafters_are_completed(cli: Cli, command: str, typed: str, offered: list[str]) -> None:
    words = f"edgespec {command} --draft {typed}"
    done = cli(_EDGESPEC_COMPLETE="bash_complete", COMP_WORDS=words, COMP_CWORD="3")
    assert [line.removeprefix("plain,") for line in done.stdout.splitlines()] == offered


def test_version_and_unknown_commands(cli: Cli) -> None:
    assert cli("--version").stdout.startswith("edgespec, version ")
    wrong = cli("chatt")
    assert wrong.returncode == 2
    assert "Did you mean 'chat'?" in wrong.stderr


def test_doctor_shows_each_result_as_it_comes(environment: dict[str, str], tmp_path: Path) -> None:
    """llama.cpp is loaded once a pipe has a writer, which comes after the lines before its own were read."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "llama_cpp.py").write_text(f"open({str(pipe)!r}).close()\n")
    with subprocess.Popen(
        [*COMMAND, "doctor"], stdout=subprocess.PIPE, env={**environment, "PYTHONPATH": str(tmp_path)}, text=True
    ) as child:
        assert child.stdout is not None
        lines = iter(child.stdout.readline, "")
        assert next(lines).startswith("machine ")
        assert any(line.startswith("texts ") for line in lines)
        pipe.open("w").close()
        assert next(lines).startswith("llamacpp   broken")
        assert any(line.startswith("mlx        works") for line in lines)
