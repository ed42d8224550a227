"""The runtimes that the contract suite runs over: each opens fresh sessions on one model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from edgespec.backends import Model, device_memory
from edgespec.backends.attached_draft import parse
from edgespec.backends.fixed_width import FixedWidthModel, FixedWidthSession
from edgespec.backends.llamacpp.model import LlamaModel, load
from edgespec.backends.mlx.model import MlxModel
from edgespec.backends.mlx.model import load as load_mlx
from edgespec.backends.options import LoadOptions
from edgespec.backends.toy_session import ToyModel, ToySession
from edgespec.core.arrays import Logits
from edgespec.core.decoding import read_prompt
from edgespec.core.protocols import CheckCancelled, Session
from tests.mlx_models import CONFIGS, DENSE, make_folder
from tests.models import DRAFT, MAKERS, TARGET
from tests.ranks import RANK_CONFIGS, load_on_two_ranks

CONTEXT = 256
WIDTH = 8  # of the sessions of fixed width


@dataclass(frozen=True)
class Runtime:
    """`open` gives a fresh session; logits of equal prefixes differ by less than `tolerance` (absolute)."""

    name: str
    open: Callable[[CheckCancelled], Session]
    tolerance: float
    _said: dict[tuple[int, ...], Logits] = field(default_factory=dict)

    def session(self, check: CheckCancelled = lambda: None) -> Session:
        return self.open(check)

    def prefilled(self, tokens: list[int], check: CheckCancelled = lambda: None) -> Session:
        session = self.session(check)
        prefill(session, tokens)
        return session

    def logits_after(self, tokens: list[int]) -> Logits:
        """[V] what a fresh session says after `tokens`; it is asked once for each text."""
        key = tuple(tokens)
        if key not in self._said:
            session = self.session()
            self._said[key] = prefill(session, tokens).copy()
            session.close()
        return self._said[key]

    def same(self, a: Logits, b: Logits) -> bool:
        return bool(np.abs(a - b).max() <= self.tolerance)


def prefill(session: Session, tokens: list[int]) -> Logits:
    """[V] scores of the last token."""
    return read_prompt(session, tokens).logits(0)


def toys() -> list[Runtime]:
    rule = ToyModel(seed=3, vocab_size=64)
    return [
        Runtime("toy-linear", lambda c: ToySession(rule, kind="linear", context_size=CONTEXT, check=c), 0.0),
        Runtime("toy-tree", lambda c: ToySession(rule, context_size=CONTEXT, check=c), 0.0),
        Runtime("toy-recurrent", lambda c: ToySession(rule, kind="recurrent", context_size=CONTEXT, check=c), 0.0),
        Runtime("fixed-toy", lambda c: FixedWidthSession(ToySession(rule, context_size=FIXED, check=c), WIDTH), 0.0),
    ]


ON_DEVICE = bool(device_memory("llamacpp"))
COARSE = (
    4 if ON_DEVICE else 1
)  # a device rounds more, and in other ways for other numbers of rows: up to 0.2 on an H200


# Logits have a standard deviation of about 3 in all of these models. The packaged one is quantized to 8 bits with an
# f16 cache, whose rounding depends on the number of rows.
PACKAGED, FLOATS = 0.15 * COARSE, 0.02 * COARSE
EXACT = PACKAGED if ON_DEVICE else 0.0  # on a device texts are exact by forwards of one width alone
LLAMA = {"packaged": PACKAGED, "packaged-exact": EXACT, **dict.fromkeys(MAKERS, FLOATS)}
SHARED = {"packaged": PACKAGED, "llama": FLOATS, "sliding-window": FLOATS}  # several sessions over one context
STREAMS = {"llama": FLOATS}  # more of them, each with cells of its own
WORKER = {"packaged": PACKAGED, "hybrid": FLOATS}  # half of the layers in another process


FIXED = CONTEXT + WIDTH - 1  # tokens of a context of which CONTEXT can be used


def fixed_model(library: str, name: str, folder: Path) -> FixedWidthModel:
    open_ = llama_model if library == "llama.cpp" else mlx_model
    return FixedWidthModel(open_(name, folder, context=FIXED), WIDTH)


def llama_model(
    name: str, folder: Path, slots: int = 1, context: int = CONTEXT, workers: tuple[str, ...] = ()
) -> LlamaModel:
    if name.startswith("packaged"):
        path = TARGET
    else:
        path = folder / f"{name}.gguf"
        MAKERS[name](path)
    is_exact = name.endswith("exact")
    return load(path, LoadOptions(context_size=context, threads=1, exact=is_exact, caches=slots, workers=workers))


# Drafts of a model itself, which are sessions like others as long as their target holds nothing.
SELF_DRAFTS = {
    "llama.cpp": {
        "layerskip:2": PACKAGED,
        "layerskip:0,1,5": PACKAGED,
        "qspec:4": 2 * PACKAGED,  # 0.18 on a processor for which nothing is repacked
        "sparse:4,250": 2 * PACKAGED,
    },
    "mlx": {"layerskip:1": 2e-3, "qspec:4": 2e-3, "sparse:4,250": 2e-3},
}


def self_drafts(library: str, method: str, folder: Path) -> Callable[[CheckCancelled], Session]:
    target: LlamaModel | MlxModel = (llama_model if library == "llama.cpp" else mlx_model)("packaged", folder)
    found = parse(method)
    assert found is not None
    draft = target.make_self_draft(found, folder=folder, progress=lambda fraction: None, check=lambda: None)
    return lambda check: draft.open_session(target.open_session(), check)


FIXED_WIDTH = {
    "llama.cpp": ("packaged", "llama", "sliding-window", "hybrid"),
    "mlx": ("dense", "sliding-window", "hybrid"),
}

# Single precision throughout, but for the quantized cache.
MLX = {"packaged": 1e-3, "quantized-cache": 0.02, **dict.fromkeys(CONFIGS, 2e-3)}


# Of which two processes have a half each. The sums of the halves are rounded in another order.
RANKS = {"quantized-cache": 0.02, **dict.fromkeys(RANK_CONFIGS, 2e-3)}


def ranks_model(name: str, folder: Path) -> Model:
    """Over two ranks, of which this process is the first."""
    config = RANK_CONFIGS.get(name, DENSE)
    options = LoadOptions(context_size=CONTEXT, kv_type="q8_0" if name == "quantized-cache" else "f16")
    return load_on_two_ranks(make_folder(folder / name, config), options)


def mlx_model(name: str, folder: Path, context: int = CONTEXT) -> MlxModel:
    if name == "packaged":
        return load_mlx(DRAFT, LoadOptions(context_size=context))  # the smaller one: the CPU build is slow
    config = CONFIGS["dense" if name == "quantized-cache" else name]
    options = LoadOptions(context_size=context, kv_type="q8_0" if name == "quantized-cache" else "f16")
    return load_mlx(make_folder(folder / name, config), options)
