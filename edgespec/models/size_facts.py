"""What decoding a model costs, from its header or, if that was not read, from the number of its parameters.

A header is several MB, mostly vocabulary, so what follows from it is stored.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from edgespec.autopilot.store import calibration_folder, load_entry, save_entry
from edgespec.backends import FileBackend
from edgespec.backends.options import DEFAULT_CONTEXT
from edgespec.formats.ggml_types import GGML_NAMES
from edgespec.formats.gguf import Header
from edgespec.formats.head_file import ModelMetadata
from edgespec.formats.mlx_folder import read_folder
from edgespec.models.file_selection import parse_quant
from edgespec.models.fit import estimate_memory
from edgespec.models.mlx_speed import EXPERTS, guess_kind, read_folder_by_kind
from edgespec.models.registry import About
from edgespec.models.resolve import LocalModel, read_parts
from edgespec.models.speed import read_by_type, share_of_long_blocks

_VERSION = 9  # of the stored facts
_BITS = 4.85  # a weight of a 4-bit model, the mean of Q4_K_M files of 7B to 70B
_ADDED = 1.15  # memory over weights with a context of 8,192 tokens, if no header says more


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Sizes in bytes.

    weights     of all tensors, or of the files
    needed      of memory with a context of 8,192 tokens, or the trained one if that is shorter
    read        of the weights that a forward of one row reads, by their type, or their kind for MLX
    parameters  in billions; None if nothing says
    mixture     whether rows may route to different experts
    exact       read from the header, not derived from the number of parameters
    long_blocks  the share of the weights that types with blocks of 256 can hold, such as Q4_K
    """

    weights: int
    needed: int
    read: Mapping[str, float]
    parameters: float | None
    mixture: bool
    exact: bool = True
    long_blocks: float = 1.0


def guess_facts(about: About, name: str, size: int | None, backend: FileBackend) -> ModelFacts | None:
    """Guesses from the parameters that the registry states, and the size of the files if known; None without either.

    `name` is that of the file or the reference, which says the type of its weights; else it is taken for a Q4_K file,
    or a folder of four bits.
    """
    if backend == "mlx":
        kind, bits = guess_kind(name)
    else:
        quant = (parse_quant(name) or "").removeprefix("UD-")
        kind = next((name for name in GGML_NAMES if f"{quant}_".startswith(f"{name}_")), "Q4_K")
        bits = GGML_NAMES[kind].bits
    if size is None and about.parameters is None:
        return None
    weights = size if size is not None else round((about.parameters or 0) * 1e9 * _BITS / 8)
    parameters = about.parameters or 8 * weights / bits / 1e9
    share = about.active / parameters if about.active else 1.0
    needed, is_mixture = round(weights * _ADDED), about.active is not None
    return ModelFacts(weights, needed, {kind: weights * share}, parameters, is_mixture, exact=False)


def read_facts(source: LocalModel) -> ModelFacts:
    """Reads the header or config of a model, or what was read earlier. Raises InvalidModelFile, CacheError, OSError."""
    found = source.path.stat()
    digest = hashlib.sha256(f"{source.path}\n{found.st_mtime_ns}\n{found.st_size}".encode("utf-8", "surrogateescape"))
    path, setting = calibration_folder() / f"facts-{digest.hexdigest()[:24]}.json", {"version": _VERSION}
    known = load_entry(path, "facts", setting, lambda found: ModelFacts(**found))
    if known is None:
        known = describe_model(read_folder(source.path) if source.kind == "mlx" else read_parts(source.path))
        save_entry(path, {"setting": setting, "facts": asdict(known)}, "facts")
    return known


def describe_model(model: ModelMetadata) -> ModelFacts:
    """Computes the facts from a header or config. Raises InvalidModelFile."""
    context = min(model.trained_context or DEFAULT_CONTEXT, DEFAULT_CONTEXT)
    needed = estimate_memory(model, context).total
    if not isinstance(model, Header):
        mixture = any(model.integer(key) for key in EXPERTS)
        return ModelFacts(model.weight_bytes, needed, read_folder_by_kind(model), None, mixture=mixture)
    parameters = sum(math.prod(tensor.shape) for tensor in model.tensors) / 1e9
    mixture = bool(model.own("expert_count"))
    blocks = share_of_long_blocks(model)
    return ModelFacts(model.weight_bytes, needed, read_by_type(model), parameters, mixture=mixture, long_blocks=blocks)
