"""llama.cpp and MLX as runtimes of the contract suite."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from edgespec.backends import Model, device_memory
from edgespec.backends.attached_draft import parse
from edgespec.backends.fixed_width import FixedWidthModel
from edgespec.backends.llamacpp.model import LlamaModel, load
from edgespec.backends.mlx.model import MlxModel
from edgespec.backends.mlx.model import load as load_mlx
from edgespec.backends.options import LoadOptions
from edgespec.core.protocols import Session
from tests.contract.toys import CONTEXT, FIXED, WIDTH, Runtime, prefill
from tests.gguf_models import DRAFT, MAKERS, TARGET
from tests.mlx_models import CONFIGS, DENSE, make_folder
from tests.ranks import RANK_CONFIGS, load_on_two_ranks
from tests.workers import started_worker

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


def self_drafts(library: str, method: str, folder: Path) -> Callable[[], Session]:
    target: LlamaModel | MlxModel = (llama_model if library == "llama.cpp" else mlx_model)("packaged", folder)
    found = parse(method)
    assert found is not None
    draft = target.make_self_draft(found, folder=folder)
    return lambda: draft.open_session(target.open_session())


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


SLOTS = {"shared": 8, "streams": 64}
PROMPT_BESIDE = list(range(40, 90))
NAMES = (
    *(f"llama.cpp-{name}" for name in LLAMA),
    *(f"shared-{name}" for name in SHARED),
    *(f"streams-{name}" for name in STREAMS),
    *(f"worker-{name}" for name in WORKER),
    *(f"draft {method} on {library}" for library, methods in SELF_DRAFTS.items() for method in methods),
    *(f"mlx-{name}" for name in MLX),
    *(f"ranks-{name}" for name in RANKS),
    *(f"fixed {name} on {library}" for library, names in FIXED_WIDTH.items() for name in names),
)


def opened(name: str, make_folder: Callable[[str], Path]) -> Iterator[Runtime]:
    """The runtime of this name, as a fixture yields it."""
    if name.startswith("draft "):
        method, library = name.removeprefix("draft ").split(" on ")
        yield Runtime(name, self_drafts(library, method, make_folder("draft")), SELF_DRAFTS[library][method])
        return
    if name.startswith("fixed "):
        kind, library = name.removeprefix("fixed ").split(" on ")
        fixed = fixed_model(library, kind, make_folder("fixed"))
        yield Runtime(name, fixed.open_session, (LLAMA if library == "llama.cpp" else MLX)[kind])
        fixed.close()
        return
    library, kind = name.split("-", 1)
    if library in SLOTS:
        model = llama_model(kind, make_folder(library), SLOTS[library])
        model.lends_cells = library == "shared"
        assert model.has_streams == (library == "streams")
        held = model.open_session(shared=True)  # another text, beside which the others are

        def shared() -> Session:
            return model.open_session(shared=True)

        prefill(held, PROMPT_BESIDE)
        yield Runtime(name, shared, (SHARED if library == "shared" else STREAMS)[kind])
        held.close()
        model.close()
        return
    if library == "worker":
        with started_worker() as worker:
            divided = llama_model(kind, make_folder(library), workers=(worker.address,))
            yield Runtime(name, divided.open_session, WORKER[kind])
            divided.close()
        return
    open_, tolerances = {
        "llama.cpp": (llama_model, LLAMA),
        "mlx": (mlx_model, MLX),
        "ranks": (ranks_model, RANKS),
    }[library]
    model = open_(kind, make_folder(library))
    yield Runtime(name, model.open_session, tolerances[kind])
    model.close()
