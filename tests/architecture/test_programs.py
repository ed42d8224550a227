"""Every folder of tests is in the normal run or in the nightly one; what only the nightly one runs can be started."""

from __future__ import annotations

import subprocess
import sys
import tomllib

from tests.gguf_models import REPOSITORY

NAMED = {"agents", "benchmarks", "gemma", "gpu", "laboratory"}  # run when they are named, as `make nightly` does

HELP = """
import sys
from importlib import import_module
from click.testing import CliRunner

started = 0
for name in sys.argv[1:]:
    main = getattr(import_module(name), "main", None)
    if main is not None:
        result = CliRunner().invoke(main, ["--help"], prog_name=name)
        assert result.exit_code == 0 and result.output.startswith(f"Usage: {name}"), (name, result.output)
        started += 1
print(started)
"""


def test_the_normal_run_has_all_other_folders() -> None:
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]
    tests = {path.relative_to(REPOSITORY / "tests").parts[0] for path in (REPOSITORY / "tests").rglob("test_*.py")}
    assert sorted(settings["ini_options"]["testpaths"]) == sorted(f"tests/{name}" for name in tests - NAMED)


def test_every_program_shows_its_help() -> None:
    """All programs in one process, which imports them as users do."""
    files = [
        path.relative_to(REPOSITORY).with_suffix("")
        for folder in ("benchmarks", "laboratory")
        for path in (REPOSITORY / folder).rglob("*.py")
        if path.name != "__init__.py"
    ]
    child = subprocess.run(
        [sys.executable, "-c", HELP, *(".".join(file.parts) for file in files)],
        cwd=REPOSITORY, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr
    guard = '__name__ == "__main__"'
    programs = [file for file in files if guard in (REPOSITORY / file).with_suffix(".py").read_text(encoding="utf-8")]
    assert int(child.stdout) == len(programs) > 0
