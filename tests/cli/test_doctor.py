"""`edgespec doctor`, `show`, `list`, `completion`, `--version`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from edgespec.cli.doctor import describe_huge_pages, find_huge_page_problems
from edgespec.drafters import drafter_specs
from tests.cli.conftest import COMMAND, Cli

HEADS = [name for name, spec in drafter_specs().items() if spec.needs == "head"]
WORDS = ["ngram", "suffix", "recycling", "jacobi", "model", *HEADS, "pard", "http", "layerskip", "qspec", "sparse"]
OFFERED = ["http://" if word == "http" else word for word in WORDS]


def test_doctor_finds_the_runtimes_their_devices_and_the_drafters(cli: Cli) -> None:
    done, shown = cli("doctor", "--json"), cli("doctor").stdout
    report = json.loads(done.stdout)
    assert done.returncode == 0
    assert report["runtimes"]["llamacpp"]["state"] == "works"
    assert any(device["kind"] == "cpu" for device in report["runtimes"]["llamacpp"]["devices"])
    llamacpp = report["runtimes"]["llamacpp"]
    assert llamacpp["gpu_offload"] == any(device["kind"] in ("gpu", "igpu") for device in llamacpp["devices"])
    assert report["machine"]["ram_bytes"] > 2**30
    assert report["runtimes"]["mlx"]["state"] == "works"
    assert "edgespec chat" in shown
    found = {each["name"]: each for each in report["drafters"]}
    assert [*found] == [*drafter_specs()] and all(found[name]["package"] == "edgespec" for name in ("ngram", "self"))
    assert found["self"]["words"] == ["layerskip[:K]", "qspec[:BITS]", "sparse[:SINK,WINDOW]"]
    assert f"drafters   ngram: {found['ngram']['summary']}\n           suffix: " in shown
    assert report["settings"] == {}, "nothing is measured yet"


@pytest.mark.parametrize("mode", ["always", "madvise", "never"])
def test_doctor_knows_the_kernels_mode_of_huge_pages(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    modes = " ".join(f"[{each}]" if each == mode else each for each in ("always", "madvise", "never"))
    (tmp_path / "enabled").write_text(modes + "\n")
    (tmp_path / "hpage_pmd_size").write_text("33554432\n")
    found = describe_huge_pages(tmp_path)
    assert found is not None and (found["mode"], found["page_bytes"]) == (mode, 2**25)
    if mode == "never":
        assert not found["granted"]
        (problem,) = find_huge_page_problems(found)
        assert "huge pages are off" in problem["problem"]
        assert problem["fix"] == "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"
    assert find_huge_page_problems({**found, "granted": True}) == []


def test_doctor_reports_huge_pages_that_the_kernel_does_not_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert describe_huge_pages(tmp_path) is None and find_huge_page_problems(None) == []
    (tmp_path / "enabled").write_text("always [madvise] never\n")
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=0")
    found = describe_huge_pages(tmp_path)
    assert found is not None and found["set_by_user"] and find_huge_page_problems({**found, "granted": False}) == []
    (problem,) = find_huge_page_problems({**found, "granted": False, "set_by_user": False})
    assert "no huge pages" in problem["problem"] and "compact_memory" in problem["fix"]


@pytest.mark.skipif(sys.platform != "linux", reason="transparent huge pages are Linux's")
def test_doctor_shows_the_huge_pages_of_this_machine(cli: Cli) -> None:
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    found = json.loads(cli("doctor", "--json", GLIBC_TUNABLES="").stdout)["huge_pages"]
    if not enabled.is_file():
        assert found is None
        return
    assert f"[{found['mode']}]" in enabled.read_text() and not found["set_by_user"]
    kept = cli("doctor", GLIBC_TUNABLES="glibc.malloc.hugetlb=0").stdout
    assert f"\nhuge pages {found['mode']}, left to GLIBC_TUNABLES\n" in kept


def test_doctor_works_without_a_runtime(cli: Cli, tmp_path: Path) -> None:
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
    done = cli("doctor", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert "llama.cpp is not installed" in done.stdout
    assert "pip install llama-cpp-python" in done.stdout
    refused = cli("run", "x", PYTHONPATH=str(tmp_path))
    assert refused.returncode == 7
    assert "pip install llama-cpp-python" in refused.stderr
    refused = cli("run", "x", "--backend", "mlx", PYTHONPATH=str(tmp_path))
    assert refused.returncode == 7
    assert "mlx-lm" in refused.stderr


def test_doctor_survives_a_runtime_that_dies(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "llama_cpp.py").write_text("import os\nos.abort()\n")
    (tmp_path / "mlx.py").write_text("")
    done = cli("doctor", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert "llama.cpp does not work" in done.stdout
    assert "MLX does not work: edgespec.errors.BackendUnavailable" in done.stdout
    assert "--force-reinstall" in done.stdout


@pytest.fixture
def plugins(tmp_path: Path) -> str:
    """A folder of installed packages: `other` adds a drafter; those of `broken` and `thief` are refused."""
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
    return str(folder)


def test_doctor_shows_measured_settings(cli: Cli) -> None:
    assert cli("run", "def f(x):", "--max-tokens", "2", "--threads", "1").returncode == 0
    ((name, lines),) = json.loads(cli("doctor", "--json").stdout)["settings"].items()
    assert name == "target.gguf" and lines[0].startswith("flash attention")
    assert f"settings   target.gguf: {lines[0]}\n" in cli("doctor").stdout


def test_doctor_lists_drafters_of_packages_and_those_refused(cli: Cli, plugins: str) -> None:
    report = json.loads(cli("doctor", "--json", PYTHONPATH=plugins).stdout)
    found = {each["name"]: each for each in report["drafters"]}
    summary = "what followed the longest match"
    assert found["automaton"] == {"name": "automaton", "words": ["automaton"], "summary": summary, "package": "other"}
    assert found["bad"]["package"] == "broken" and "MISSING" in found["bad"]["refused"]
    assert found["copy"] == {"name": "copy", "package": "thief", "refused": "the name 'ngram' is taken"}
    assert found["ngram"]["package"] == "edgespec"
    assert {problem["fix"] for problem in report["problems"]} == {
        "pip install --upgrade broken",
        "pip install --upgrade thief",
    }
    done = cli("doctor", PYTHONPATH=plugins)
    assert done.returncode == 0 and "automaton (other): what followed the longest match" in done.stdout
    assert "problem: the drafter copy is refused: the name 'ngram' is taken" in done.stdout


def test_a_drafter_of_a_package_is_offered_and_drafts(cli: Cli, plugins: str) -> None:
    listed = f"Drafters: {', '.join(WORDS)}, automaton."
    assert listed in cli("run", "x", "--draft", "automatn", PYTHONPATH=plugins).stderr
    run = ("run", "def f(x):", "--max-tokens", "8", "--temperature", "0", "--threads", "1", "--ctx", "128", "--json")
    assert json.loads(cli(*run, "--draft", "ngram+automaton", PYTHONPATH=plugins).stdout)["draft"] == "ngram+automaton"
    everything = json.loads(cli(*run, PYTHONPATH=plugins).stdout)
    names = everything["draft"].split("+")
    assert names[0] == "ngram" and names[-2:] == ["package:python-6m/draft.gguf", "automaton"]


def test_show_prices_the_embedded_target(cli: Cli) -> None:
    facts = json.loads(cli("show", "--json", "--ctx", "1024").stdout)
    assert (facts["architecture"], facts["layers"], facts["vocabulary"]) == ("llama", 6, 4096)
    assert facts["parameters"] == 5_770_496
    assert facts["kv_bytes"] == 6 * 2 * 2 * 64 * 2 * 1024  # layers, k and v, kv heads, head width, f16, tokens
    assert "5,770,496" in cli("show", "python-6m").stdout


def test_list_names_the_registry(cli: Cli) -> None:
    names = [entry["name"] for entry in json.loads(cli("list", "--json").stdout)["aliases"]]
    assert "llama-70b-q4" in names and "python-6m" in names
    embedded = json.loads(cli("list", "--json").stdout)["aliases"][0]
    assert embedded["here"] and embedded["fit"] == "fits" and not embedded["estimated"]
    shown = cli("list").stdout
    assert shown.split("\n")[0].split() == ["NAME", "SIZE", "FIT", "HERE", "DESCRIPTION"] and "edgespec pull" in shown
    assert "~4.5 GiB" in next(line for line in shown.splitlines() if line.startswith("llama-8b-q4"))


def test_completion_scripts_are_valid_and_complete(cli: Cli) -> None:
    script = cli("completion", "bash").stdout
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    done = cli(_EDGESPEC_COMPLETE="bash_complete", COMP_WORDS="edgespec do", COMP_CWORD="1")
    assert "doctor" in done.stdout


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("ng", ["ngram"]),
        ("", ["auto", *OFFERED, "none"]),
        ("ngram+", [f"ngram+{name}" for name in OFFERED[1:]]),
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
