"""The readings of a head that are tried, by kind and runtime, and their words."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgespec.backends import BackendName
from edgespec.engine.head_probe import describe_reading, list_readings
from edgespec.formats.heads import HeadKind, HeadSpec

N = 6  # layers of the target


def make(kind: HeadKind, layers: tuple[int, ...] | None) -> HeadSpec:
    return HeadSpec(kind, 64, layers, 64)


def readings(spec: HeadSpec, backend: BackendName) -> list[str]:
    return [describe_reading(each) for each in list_readings(spec, backend, N)]


@pytest.mark.parametrize(
    ("kind", "layers", "llamacpp", "mlx"),
    [
        ("eagle3", (1, 3, 5), ["layers 2, 4, 6", "layers 0, 2, 4"],
         ["layers 1, 3, 5, norm_before_residual", "layers 1, 3, 5, norm_output", "layers 2, 4, 6", "layers 0, 2, 4"]),
        ("eagle3", (0, 3, 6), [], ["layers 0, 3, 6, norm_before_residual", "layers 0, 3, 6, norm_output"]),
        ("eagle3", (), [], ["the last hidden state, norm_before_residual", "the last hidden state, norm_output"]),
        ("dflash", (0, 2), ["layers 1, 3"], ["layers 1, 3"]),
        ("dspark", (5, 6), ["layers 5, 6, sample_from_anchor", "layers 4, 5"],
         ["layers 5, 6, sample_from_anchor", "layers 4, 5"]),
        ("mtp", (), [], ["layers 6", "the last hidden state, norm_output"]),
        ("eagle", (), [], ["layers 6"]),
        ("medusa", (), [], []),
        ("gemma4-assistant", (), [], []),
    ],
)  # fmt: skip
def test_readings(kind: HeadKind, layers: tuple[int, ...], llamacpp: list[str], mlx: list[str]) -> None:
    spec = make(kind, layers)
    assert readings(spec, "llamacpp") == llamacpp
    assert readings(spec, "mlx") == mlx


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "dspark", "mtp", "eagle"])
def test_a_reading_leads_back_to_what_it_came_from(kind: HeadKind) -> None:
    spec = make(kind, (2, 3) if kind in ("eagle3", "dflash", "dspark") else ())
    for other in list_readings(spec, "mlx", N):
        assert other != spec and spec in list_readings(other, "mlx", N)


def test_readings_are_told() -> None:
    silent = make("eagle3", None)
    usual = silent.complete(N)
    assert usual.layers == (2, 3, 3) and usual.complete(99) == usual
    assert describe_reading(silent) == "layers that it does not name"
    assert describe_reading(replace(usual, feeds_normed=True)) == "layers 2, 3, 3, norm_output"
