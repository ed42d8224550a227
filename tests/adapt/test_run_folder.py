"""The folder of a run: whether the next one goes on, and that no two use it."""

from __future__ import annotations

import stat
from pathlib import Path
from time import time

import pytest

from edgespec.adapt.run import open_run
from edgespec.errors import CacheError, Cancelled, InvalidRequest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "adapted" / "pair" / "training"


def stop(folder: Path, options: str) -> float:
    """Begin a run, leave a checkpoint, and stop it; returns when it began."""
    with pytest.raises(Cancelled), open_run(folder, options) as began_s:
        (folder / "0000000010.checkpoint").touch()
        raise Cancelled
    return began_s


def test_the_same_run_goes_on(folder: Path) -> None:
    before_s = time()
    began_s = stop(folder, "one")
    assert before_s <= began_s <= time() and stop(folder, "one") == began_s
    with open_run(folder, "one") as again_s:
        assert again_s == began_s and (folder / "0000000010.checkpoint").exists()
        modes = {stat.S_IMODE(path.stat().st_mode) for path in (folder / "run.json", folder / "lock")}
        assert modes == {0o600} and stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not folder.exists()


def test_a_run_with_other_options_starts_anew(folder: Path) -> None:
    """It may start from another version, whose weights no key of a checkpoint tells."""
    began_s = stop(folder, "one")
    with open_run(folder, "two") as later_s:
        assert later_s > began_s and not list(folder.glob("*.checkpoint"))


def test_a_run_that_kept_nothing_is_forgotten(folder: Path) -> None:
    """A refusal for want of texts would hide all later texts from the same command."""
    with pytest.raises(InvalidRequest), open_run(folder, "one") as began_s:
        raise InvalidRequest("too few.", hint="Chat.")
    assert not folder.exists()
    with open_run(folder, "one") as later_s:
        assert later_s > began_s


def test_a_damaged_state_starts_anew(folder: Path) -> None:
    stop(folder, "one")
    (folder / "run.json").write_text("{")
    with open_run(folder, "one"):
        assert not list(folder.glob("*.checkpoint"))


def test_one_process_runs_it(folder: Path) -> None:
    with open_run(folder, "one"):
        (folder / "0000000010.checkpoint").touch()
        with pytest.raises(InvalidRequest, match="already"), open_run(folder, "two"):
            pass
        assert (folder / "0000000010.checkpoint").exists()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "adapted").touch()
    with pytest.raises(CacheError, match="cannot be written"), open_run(tmp_path / "adapted" / "pair" / "run", "one"):
        pass
