"""How fast this machine reads weights: a measurement of a small shape, and what is stored of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from edgespec.autopilot.store import save_entry
from edgespec.backends.options import LoadOptions
from edgespec.errors import InvalidModelFile
from edgespec.formats.ggml_types import GGML_NAMES
from edgespec.formats.gguf import TensorInfo
from edgespec.models import speed
from edgespec.models.speed import MachineSpeed, load_speed, measure_speed, save_speed, share_of_long_blocks

SPEED = MachineSpeed({"Q4_0": {1: 1e-10, 4: 2e-10}, "Q4_1": {1: 1.6e-10, 4: 5e-10}, "Q8_0": {1: 0.9e-10, 4: 1.5e-10}})


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(tmp_path / "cache"))


def test_types_are_measured_on_a_shape_of_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"_WIDTH": 256, "_FEED_FORWARD": 512, "_BYTES": 2**20, "_TYPE_PROFILE_S": 0.05}
    for name, value in small.items():
        monkeypatch.setattr(speed, name, value)
    rates = speed._measure(["Q2_0", "Q4_1", "Q4_K"], tmp_path, LoadOptions(threads=1))
    assert [*rates] == ["Q4_1", "Q4_K"], "gguf writes no Q2_0"
    assert not [*tmp_path.glob("*.gguf")]
    assert all(1 in rates[kind] for kind in ("Q4_1", "Q4_K"))
    assert all(seconds > 0 for rate in rates.values() for seconds in rate.values())
    few, many = (speed._make_header(kind).own("block_count") or 0 for kind in ("F16", "Q4_0"))
    assert few < many, "about as many bytes of each type"


def test_a_type_that_llamacpp_refuses_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(name: str, *_rest: object) -> dict[int, float]:
        if name == "Q4_0":
            raise InvalidModelFile("llama.cpp cannot load it.", hint="Use another type.")
        return {1: 1e-10}

    monkeypatch.setattr(speed, "_measure_type", measure)
    assert [*speed._measure(["Q4_0", "Q8_0"], tmp_path, LoadOptions())] == ["Q8_0"]


def test_only_what_is_not_stored_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def measure(_work: object, types: list[str], *_rest: object, **_more: object) -> dict[str, dict[int, float]]:
        asked.append(types)
        return {kind: {1: 1e-10, 2: 2e-10} for kind in types}

    monkeypatch.setattr(speed, "run_in_child", measure)
    told: list[str] = []
    assert load_speed() == MachineSpeed() and measure_speed(["I8"]) == MachineSpeed()
    assert measure_speed(["Q4_K"], told.append) == load_speed() == MachineSpeed({"Q4_K": {1: 1e-10, 2: 2e-10}})
    assert told == ["measuring this machine once, with weights of 1 types: Q4_K …"]
    measure_speed(["Q4_K", "Q8_0"])
    measure_speed(["Q4_K"], again=True)
    assert asked == [["Q4_K"], ["Q8_0"], ["Q4_K"]] and load_speed().rates.keys() == {"Q4_K", "Q8_0"}
    monkeypatch.setattr(speed, "_VERSION", 0)
    assert load_speed() == MachineSpeed(), "another shape"


def test_a_damaged_store_reads_as_empty() -> None:
    for rate in ({"2": 1e-10}, {"1": 0}, {"1": "fast"}, []):
        entry = {"setting": speed._setting(LoadOptions()), "rates": {"Q4_0": rate}}
        save_entry(speed._path(), entry, "rates")
        assert load_speed() == MachineSpeed()
    save_speed(SPEED)
    assert load_speed() == SPEED


def test_the_time_of_a_round_grows_with_the_bytes_of_each_type() -> None:
    small, large = SPEED.estimate({"Q4_0": 1e9}), SPEED.estimate({"Q4_0": 1e9, "Q8_0": 1e9, "F32": 1e3})
    assert small is not None and large is not None and small.draft_s is None
    assert large.rows[1] - small.rows[1] == pytest.approx(0.09, rel=1e-4)
    assert large.rows[4] - small.rows[4] == pytest.approx(0.15, rel=1e-4)
    assert SPEED.estimate({"Q5_K": 1e9}) is None and SPEED.estimate({}) is None
    pair = SPEED.estimate({"Q4_0": 1e9}, {"Q8_0": 1e8})
    assert pair is not None and pair.draft_s == pytest.approx(0.009, rel=0.1)


def test_a_much_faster_type_of_the_same_size_is_named() -> None:
    faster = SPEED.find_faster({"Q4_1": 1e9, "F32": 1e5})
    assert faster is not None and (faster.name, faster.instead_of) == ("Q4_0", "Q4_1")
    assert faster.gain == pytest.approx(1.6 * 20 / 18, rel=0.01), "Q4_0 has fewer bytes, too"
    assert "Q4_0 weights are 1.8 times as fast as Q4_1 weights on this machine" in str(faster)
    assert SPEED.find_faster({"Q4_0": 1e9}) is None and SPEED.find_faster({"Q8_0": 1e9}) is None
    assert SPEED.find_faster({"MXFP4": 1e9}) is None, "its model was trained so"


def test_a_type_whose_blocks_do_not_fit_the_rows_is_not_named() -> None:
    machine = MachineSpeed({"Q4_1": {1: 2e-10}, "Q4_K": {1: 1e-10}})
    faster = machine.find_faster({"Q4_1": 1e9}, 0.95)
    assert faster is not None and faster.name == "Q4_K"
    assert machine.find_faster({"Q4_1": 1e9}, 0.17) is None


def test_rows_of_whole_blocks_are_counted() -> None:
    """Those of 576 elements, as SmolLM2-135M has them, are none; a norm's do not count."""
    wide = speed._make_header("Q4_0", 2048, 1)
    assert share_of_long_blocks(wide) == 1.0
    shapes = {"a": (576, 100), "b": (1536, 100), "norm": (512,)}
    tensors = tuple(TensorInfo(name, shape, GGML_NAMES["F16"], 0) for name, shape in shapes.items())
    assert share_of_long_blocks(replace(wide, tensors=tensors)) == pytest.approx(1536 / (1536 + 576))


def test_types_are_compared_by_the_time_of_a_weight() -> None:
    assert SPEED.compare_types() == {"Q4_0": 1.0, "Q8_0": pytest.approx(1.7), "Q4_1": pytest.approx(16 / 9)}
