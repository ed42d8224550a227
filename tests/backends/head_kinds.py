"""Which kind of trained head runs on which runtime, and how a file of random weights of it is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.backends import mlx_dflash_heads
from tests.backends.dflash_heads import Dialect, make_dflash
from tests.backends.eagle3_heads import make_head, make_head_folder
from tests.backends.medusa_heads import make_hydra, make_medusa
from tests.backends.mtp_heads import make_mixture
from tests.backends.pair_heads import make_pair_folder


@dataclass(frozen=True)
class TargetShape:
    """What a head's file depends on. GGUF files are made for the packaged target, whatever the shape.

    layers  three whose inputs are read
    """

    size: int
    vocab_size: int
    layers: tuple[int, int, int]


Maker = Callable[[Path, TargetShape], Path]


def _pair(kind: str) -> Maker:
    return lambda path, shape: make_pair_folder(path, kind, size=shape.size, vocab_size=shape.vocab_size)


def _block(kind: str) -> Maker:
    return lambda path, shape: mlx_dflash_heads.make_folder(
        path, kind, size=shape.size, layers=shape.layers, vocab_size=shape.vocab_size
    )


KINDS: dict[str, dict[str, Maker]] = {
    "eagle3": {
        "llama.cpp": lambda path, _: make_head(path).path,
        "mlx": lambda path, shape: make_head_folder(
            path, target_size=shape.size, layers=shape.layers, vocab_size=shape.vocab_size
        ),
    },
    "eagle": {"mlx": _pair("eagle")},
    "mtp": {"llama.cpp": lambda path, _: make_mixture(path, is_quantized=True), "mlx": _pair("mtp")},
    "medusa": {"mlx": lambda path, shape: make_medusa(path, size=shape.size, vocab_size=shape.vocab_size)},
    "hydra": {"mlx": lambda path, shape: make_hydra(path, size=shape.size, vocab_size=shape.vocab_size)},
    "dflash": {"llama.cpp": lambda path, _: make_dflash(path, Dialect(is_reduced=True)), "mlx": _block("dflash")},
    "dspark": {
        "llama.cpp": lambda path, _: make_dflash(path, Dialect(markov=True, is_reduced=True)),
        "mlx": _block("dspark"),
    },
}


def kinds_on(runtime: str) -> tuple[str, ...]:
    """The kinds that run on "llama.cpp" or "mlx"."""
    return tuple(kind for kind, makers in KINDS.items() if runtime in makers)
