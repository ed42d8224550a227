"""`edgespec recommend` against a hub on this machine, and without one."""

from __future__ import annotations

import json
from typing import get_args

from edgespec.cli.recommend import TASKS
from edgespec.models.registry import Task
from tests.cli.conftest import Cli


def test_tasks_are_those_of_the_registry() -> None:
    assert get_args(Task) == TASKS


def test_the_registry_answers_offline_and_says_so(cli: Cli) -> None:
    done = cli("recommend", "--no-speed")
    assert done.returncode == 0
    assert "note: Offline mode is on. This is the registry alone" in done.stderr
    assert "`edgespec chat NAME` downloads and opens it." in done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["NAME", "QUALITY", "DOWNLOAD", "TOK/S", "DRAFTED", "LICENSE"]
    embedded = next(line.split() for line in lines if line.startswith("python-6m"))
    assert embedded == ["python-6m", "toy", "here", "MIT"]
    assert any(line.endswith(":") for line in lines) and "~" in done.stdout
    reasoning = json.loads(cli("recommend", "qwen3", "--for", "reasoning", "--no-speed", "--json").stdout)
    names = [each["name"] for each in reasoning["models"]]
    assert names and all(name.startswith("qwen3") for name in names) and reasoning["notices"]
    assert "No model matches." in cli("recommend", "nothing-like-it", "--no-speed").stdout


def test_wrong_values(cli: Cli) -> None:
    for wrong in (["--for", "agents"], ["--max-size", "0"], ["--max-size", "inf"], ["--max-size", "big"]):
        done = cli("recommend", *wrong)
        assert done.returncode == 2 and "hint: Run `edgespec recommend --help`." in done.stderr
