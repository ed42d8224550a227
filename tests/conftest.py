"""Markers by folder: `fast` and `contract` make up `make check`; `slow` is the rest."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from edgespec.backends.llamacpp.tiles import amx_is_sound
from edgespec.progress import reporting
from tests.fast_mlx import hasten_mlx
from tests.reporter import Heard

hasten_mlx()
amx_is_sound()  # once for all processes that tests start
# Machines that run the suite are shared: no test fails because its inputs were made slowly.
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")
os.environ["EDGESPEC_MODEL"] = "python-6m"  # what opens where a test names no model, whatever packages are installed

TESTS = Path(__file__).parent
MARKERS = {
    "fast": ("architecture", "core", "drafters", "formats", "text"),
    "contract": ("contract",),
    "real": ("real",),
    "gpu": ("gpu",),
    "slow": (
        "agents", "answers", "api", "autopilot", "backends", "bench", "benchmarks", "chat", "cli", "client", "engine",
        "examples", "export", "fixtures", "gemma", "laboratory", "machines", "memory", "models", "plugin",
        "server", "train",
    ),
}  # fmt: skip
_MARKER = {folder: marker for marker, folders in MARKERS.items() for folder in folders}


def find_marker(path: Path) -> str:
    """The marker of a file or folder below tests/. Raises UsageError for a folder that has none."""
    folder = path.relative_to(TESTS).parts[0]
    if folder.endswith(".py"):
        return "fast"
    if folder not in _MARKER:
        raise pytest.UsageError(f"tests/{folder} has no marker: add it to MARKERS in tests/conftest.py")
    return _MARKER[folder]


@pytest.fixture
def heard() -> Iterator[Heard]:
    """What is reported while the test runs."""
    made = Heard()
    with reporting(made):
        yield made


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the options
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Spread the whole suite over four processes, by files: three leave a quarter of two cores idle.

    Files and folders that are named run in this process, and so does everything with `-n 0` or `--pdb`.
    """
    is_worker = hasattr(config, "workerinput")
    is_whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    if is_whole and not is_worker and config.option.numprocesses is None and not config.option.usepdb:
        config.option.numprocesses, config.option.dist = 4, "loadfile"
        config.option.loadscopereorder = False  # by numbers of tests: slow files with few tests would come last


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m "fast or contract"`, other folders need not be imported to be deselected."""
    wanted = set(config.option.markexpr.split(" or "))
    is_folder = (
        collection_path.is_dir() and collection_path.parent == TESTS and not collection_path.name.startswith("_")
    )
    return True if is_folder and wanted <= MARKERS.keys() and find_marker(collection_path) not in wanted else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(TESTS):
            item.add_marker(find_marker(item.path))
