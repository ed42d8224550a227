"""edgespec and the distribution `edgespec-automaton`, each from its wheel in a fresh environment: the drafter is there.

Nothing is downloaded: the other packages are those of the environment that runs the tests.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gguf_models import REPOSITORY

PROMPT = "def read_lines(path):"  # the embedded model repeats itself after it
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a fresh environment."""
    uv = shutil.which("uv")
    if uv is None:
        pytest.fail("this test needs uv: python3 -m pip install uv")
    folder = tmp_path_factory.mktemp("installed")
    wheels, fresh = folder / "wheels", folder / "environment"

    def call(*arguments: str | Path) -> None:
        child = subprocess.run(
            [uv, *arguments, "--offline"], capture_output=True, text=True, cwd=folder, check=False, timeout=120
        )
        assert child.returncode == 0, child.stderr

    for source in (REPOSITORY, Path(__file__).parent / "edgespec-automaton"):
        call("build", "--wheel", "--out-dir", wheels, source)
    call("venv", "--python", sys.executable, fresh)
    call("pip", "install", "--no-deps", "--python", fresh, *sorted(wheels.glob("*.whl")))
    (packages,) = fresh.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    return fresh


@pytest.fixture
def run(environment: Path, tmp_path: Path) -> Run:
    """Run the installed command; it must end well."""
    dropped = ("HF_", "EDGESPEC_", "XDG_", "PYTHONPATH", "VIRTUAL_ENV")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
    folders = {f"EDGESPEC_{name}_DIR": str(tmp_path / name) for name in ("CACHE", "CONFIG", "DATA")}
    others = {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1", "EDGESPEC_MODEL": "python-6m"}
    variables = kept | folders | others

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(environment / "bin" / "edgespec"), *arguments]
        child = subprocess.run(
            command, env=variables, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120
        )
        assert child.returncode == 0, child.stderr
        return child

    return call


def generate(run: Run, *options: str) -> tuple[str, list[tuple[set[str], int, int]]]:
    """(the text, for each round its drafters and the numbers of drafted and accepted tokens)"""
    child = run("run", PROMPT, "--explain", "--threads", "1", "--temperature", "0", "--max-tokens", "120", *options)
    rounds = re.findall(r"^ *\d+  (\S+) +(\d+) +(\d+) ", child.stderr, re.MULTILINE)
    assert len(rounds) > 10
    return child.stdout, [(set(names.split("+")), int(drafted), int(accepted)) for names, drafted, accepted in rounds]


def test_the_environment_is_the_fresh_one(environment: Path, tmp_path: Path) -> None:
    code = "import edgespec, edgespec_automaton; print(edgespec.__file__); print(edgespec_automaton.__file__)"
    command = [str(environment / "bin" / "python"), "-c", code]
    child = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert all(Path(line).is_relative_to(environment) for line in child.stdout.splitlines())


def test_auto_loads_it_and_it_drafts_beside_others(run: Run) -> None:
    """When the autopilot asks whom depends on the machine's speed; a fixed length asks all in every round."""
    loaded = json.loads(run("run", PROMPT, "--json", "--max-tokens", "8", "--draft", "auto").stdout)["draft"]
    assert {"ngram", "automaton"} < set(loaded.split("+"))
    _, rounds = generate(run, "--draft", "automaton+ngram", "--draft-max", "3", "--draft-tree", "6")
    assert sum(accepted for names, _, accepted in rounds if "automaton" in names) >= 8
    assert any(names != {"automaton"} for names, drafted, _ in rounds if drafted)


def test_it_drafts_alone(run: Run) -> None:
    plain, _ = generate(run, "--draft", "none")
    text, rounds = generate(run, "--draft", "automaton", "--draft-max", "3", "--draft-tree", "6")
    assert text == plain
    assert {name for names, drafted, _ in rounds for name in names if drafted} == {"automaton"}
    assert sum(accepted for _, _, accepted in rounds) >= 8
