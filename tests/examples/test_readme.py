"""What README.md and docs/python.md promise: options, commands and figures exist.

tests/architecture/test_style.py checks the types of their programs.
"""

from __future__ import annotations

import re

import edgespec
from tests.gguf_models import REPOSITORY

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
OTHERS = {"--pip-args", "--prefer-binary", "--extra-index-url", "--hostfile"}  # of pip, pipx and mlx.launch


def test_every_argument_is_documented() -> None:
    text = (REPOSITORY / "docs" / "python.md").read_text(encoding="utf-8")
    names = edgespec.LoadArguments.__annotations__.keys() | edgespec.GenerationArguments.__annotations__.keys()
    assert {name for name in names if f"`{name}`" not in text} == set()


def test_its_options_exist() -> None:
    reference = (REPOSITORY / "docs" / "cli.md").read_text(encoding="utf-8")
    options = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", README)) - OTHERS
    assert len(options) > 10
    assert {option for option in options if not re.search(rf"{option}(?![\w-])", reference)} == set()


def test_its_commands_exist() -> None:
    reference = (REPOSITORY / "docs" / "cli.md").read_text(encoding="utf-8")
    commands = set(re.findall(r"(?:^    |`)edgespec ([a-z]+)", README, re.MULTILINE))
    assert {name for name in commands if f"## edgespec {name}\n" not in reference} == set()


def test_its_figures_are_those_of_the_benchmarks() -> None:
    measured = (REPOSITORY / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    figures = [
        f"{mean} ({interval})" for mean, interval in re.findall(r"(\d\.\d\d) \((\d\.\d\d to \d\.\d\d)\)", README)
    ]
    assert len(figures) == 5
    assert [figure for figure in figures if figure not in measured] == []
