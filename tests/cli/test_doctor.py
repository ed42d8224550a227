"""`edgespec doctor`, `show`, `list`, `completion`, `--version`."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tests.cli.conftest import Cli


def test_doctor_finds_the_runtime_and_its_device(cli: Cli) -> None:
    done = cli("doctor", "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 0
    assert report["runtimes"]["llamacpp"]["state"] == "works"
    assert any(device["kind"] == "cpu" for device in report["runtimes"]["llamacpp"]["devices"])
    assert report["machine"]["ram_bytes"] > 2**30
    assert report["runtimes"]["mlx"]["state"] == "works"
    assert "edgespec chat" in cli("doctor").stdout


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


def test_show_prices_the_embedded_target(cli: Cli) -> None:
    facts = json.loads(cli("show", "--json", "--ctx", "1024").stdout)
    assert (facts["architecture"], facts["layers"], facts["vocabulary"]) == ("llama", 6, 4096)
    assert facts["parameters"] == 5_770_496
    assert facts["kv_bytes"] == 6 * 2 * 2 * 64 * 2 * 1024  # layers, k and v, kv heads, head width, f16, tokens
    assert "5,770,496" in cli("show", "python-6m").stdout


def test_list_names_the_registry(cli: Cli) -> None:
    names = [entry["name"] for entry in json.loads(cli("list", "--json").stdout)["aliases"]]
    assert "llama-70b-q4" in names and "python-6m" in names
    assert "edgespec pull" in cli("list").stdout


def test_completion_scripts_are_valid_and_complete(cli: Cli) -> None:
    script = cli("completion", "bash").stdout
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    done = cli(_EDGESPEC_COMPLETE="bash_complete", COMP_WORDS="edgespec do", COMP_CWORD="1")
    assert "doctor" in done.stdout


def test_version_and_unknown_commands(cli: Cli) -> None:
    assert cli("--version").stdout.startswith("edgespec, version ")
    wrong = cli("chatt")
    assert wrong.returncode == 2
    assert "Did you mean 'chat'?" in wrong.stderr
