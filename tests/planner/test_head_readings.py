"""The readings of a head that are tried, by kind and runtime, and their words."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgespec.backends import BackendName
from edgespec.formats.heads import HeadKind, HeadSpec
from edgespec.planner.head_probe import complete, describe_change, describe_reading, list_conventions

N = 6  # layers of the target


def make(kind: HeadKind, layers: tuple[int, ...] | None) -> HeadSpec:
    return HeadSpec(kind, 64, layers, 64, 100)


def readings(spec: HeadSpec, backend: BackendName) -> list[str]:
    return [
        describe_reading(each) for convention in list_conventions(spec.kind, backend) for each in convention(spec, N)
    ]


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
        ("mtp", (), [], ["layer 6", "the last hidden state, norm_output"]),
        ("eagle", (), [], ["layer 6"]),
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
    for convention in list_conventions(kind, "mlx"):
        for other in convention(spec, N):
            assert other != spec and spec in convention(other, N)


def test_changes_are_told() -> None:
    silent = make("eagle3", None)
    usual = complete(silent, N)
    assert usual.layers == (2, 3, 3) and complete(usual, 99) == usual
    assert describe_change(silent, usual) == "layers were read as 2, 3, 3 (the file names none)"
    stated = make("eagle3", (2, 4, 6))
    assert describe_change(stated, stated) == ""
    chosen = replace(stated, layers=(1, 3, 5), feeds_normed=True)
    assert describe_change(stated, chosen) == (
        "layers were read as 1, 3, 5 (the file says 2, 4, 6), and norm_output was read as true (the file says false)"
    )
    assert describe_change(make("mtp", ()), make("mtp", (6,))) == (
        "layers were read as 6 (the file says the last hidden state)"
    )
