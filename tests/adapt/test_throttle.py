"""Training waits while an engine of this user works, in whatever process, and only then."""

from __future__ import annotations

import os
import subprocess
import sys
from math import nan
from pathlib import Path

import pytest

from edgespec.adapt.options import Throttle, is_on_battery
from edgespec.backends.options import LoadOptions
from edgespec.core.sampling import SamplingParams
from edgespec.engine.events import Request
from edgespec.errors import Cancelled, InvalidRequest
from edgespec.planner.plan import LoadConfig
from edgespec.service.learn import Activity, activity_path, is_any_engine_working
from edgespec.service.local import LocalEngine
from tests.adapt.runs import cancel_at
from tests.models import REPOSITORY


def ignore() -> None:
    """Never cancels."""


def test_it_waits_and_goes_on() -> None:
    asked: list[str] = []

    def must_wait() -> bool:
        asked.append("wait")
        return len(asked) < 3

    def must_stop() -> bool:
        asked.append("stop")
        return False

    assert Throttle(must_wait=must_wait, must_stop=must_stop).before_step(0, ignore) is None
    assert asked == ["wait"] * 3 + ["stop"]


def test_it_stops() -> None:
    free = Throttle(60, must_wait=lambda: False, must_stop=lambda: False)
    assert free.before_step(59.9, ignore) is None and free.before_step(60, ignore) == "time"
    assert Throttle(60, must_wait=lambda: False, must_stop=lambda: True).before_step(0, ignore) == "battery"


@pytest.mark.parametrize("limit_s", [nan, -1.0])
def test_a_limit_that_is_no_time(limit_s: float) -> None:
    with pytest.raises(InvalidRequest, match="cannot take"):
        Throttle(limit_s)


def test_a_pause_can_be_cancelled() -> None:
    check = cancel_at(3)
    with pytest.raises(Cancelled):
        Throttle(must_wait=lambda: True, must_stop=lambda: False).before_step(0, check)


def test_the_battery_of_this_machine() -> None:
    assert is_on_battery() in (True, False)


def test_a_low_priority() -> None:
    code = "import os; from edgespec.adapt.options import lower_priority; lower_priority(); print(os.nice(0))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPOSITORY)
    assert int(done.stdout) == min(os.nice(0) + 5, 19)


HOLD = """
import sys
from pathlib import Path
from edgespec.service.learn import Activity
activity = Activity(Path(sys.argv[1]))
activity.set(True)
print("held", flush=True)
sys.stdin.readline()
activity.set(False)
print("released", flush=True)
sys.stdin.readline()
"""


def hold(path: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOLD, str(path)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)
    assert child.stdout is not None and child.stdout.readline() == "held\n"
    return child


def test_engines_of_other_processes(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "working.lock"
    assert not is_any_engine_working(path)
    first, second = hold(path), hold(path)
    ours = Activity(path)
    ours.set(True)
    for _ in range(3):
        assert is_any_engine_working(path)
    ours.set(False)
    first.communicate("\n\n")
    assert is_any_engine_working(path)
    second.kill()  # the system releases its lock
    second.wait()
    assert not is_any_engine_working(path)
    ours.set(True)
    ours.close()
    assert not is_any_engine_working(path)
    for pipe in (second.stdin, second.stdout):
        assert pipe is not None
        pipe.close()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    activity = Activity(tmp_path / "file" / "working.lock")
    activity.set(True)
    activity.set(False)
    activity.close()
    assert not is_any_engine_working(tmp_path / "file" / "working.lock")


TOY = LoadConfig(model="tree", backend="toy", load=LoadOptions(context_size=200_000))


class Quiet:
    """A Reporter that reports nothing."""

    def notice(self, text: str) -> None: ...
    def download(self, name: str, done: int, total: int) -> None: ...
    def loading(self, name: str, fraction: float) -> None: ...


def test_an_engine_that_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it answers training waits; as soon as it has, training goes on, though the model stays open."""
    monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(tmp_path))
    assert activity_path().parent == tmp_path
    engine = LocalEngine()
    try:
        engine.open(TOY, Quiet()).result()
        assert Throttle(must_stop=lambda: False).before_step(0, ignore) is None
        stream = engine.stream(Request("ab", SamplingParams(0.0, logit_bias=((256, -1000.0),))))
        for n, _ in enumerate(stream):
            assert is_any_engine_working()
            if n == 20:
                break
        stream.cancel()
        assert Throttle(must_stop=lambda: False).before_step(0, ignore) is None
        assert not is_any_engine_working()
    finally:
        engine.close()
    assert not is_any_engine_working()
