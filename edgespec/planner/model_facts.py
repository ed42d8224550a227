"""What decoding a model costs, from its header or, where that was not read, from the number of its parameters.

A header at the hub is several MB, mostly vocabulary. What follows from it is stored by repository and commit.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from edgespec.backends.llamacpp.shape import count_blocks
from edgespec.backends.options import DEFAULT_CONTEXT
from edgespec.controller.store import calibration_folder
from edgespec.files import write_atomically
from edgespec.formats.ggml_types import GGML_TYPES
from edgespec.formats.gguf import Header
from edgespec.formats.metadata import ModelMetadata
from edgespec.hub.cache import RemoteModel
from edgespec.hub.file_selection import parse_quant
from edgespec.hub.hub import Hub
from edgespec.hub.reference import HubFile, HubQuant, Reference
from edgespec.planner.machine_speed import find_main_type
from edgespec.planner.memory import estimate_memory
from edgespec.planner.speed import read_by_type
from edgespec.registry.about import About
from edgespec.registry.resolve import HubGguf, HubMlx, Source, read_metadata

_VERSION = 2  # of the stored facts
_BITS = 4.85  # a weight of a 4-bit model, the mean of Q4_K_M files of 7B to 70B
_ADDED = 1.15  # memory over weights with a context of 8,192 tokens, where no header says more


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Sizes in bytes.

    weights     of all tensors, or of the files
    needed      of memory with a context of 8,192 tokens, or the trained one if that is shorter
    read        of the weights that a forward of one row reads, by their type; empty for MLX models, whose speed is not
                estimated
    parameters  in billions; None where nothing says
    mixture     whether rows may route to different experts
    exact       read from the header, not derived from the number of parameters
    """

    weights: int
    needed: int
    read: Mapping[str, float]
    parameters: float | None
    mixture: bool
    exact: bool = True

    @property
    def kind(self) -> str | None:
        """The type of most weights that are read."""
        return find_main_type(self.read)


def guess_facts(about: About, reference: Reference, size: int | None = None) -> ModelFacts | None:
    """From the parameters that the registry states, and the size of the files if that is known; None without either.

    The name of the file says the type of its weights; without one it is taken for a Q4_K file.
    """
    if size is None and about.parameters is None:
        return None
    weights = size if size is not None else round((about.parameters or 0) * 1e9 * _BITS / 8)
    share = about.active / about.parameters if about.active and about.parameters else 1.0
    read = {_guess_type(reference): weights * share}
    return ModelFacts(weights, round(weights * _ADDED), read, about.parameters, about.active is not None, exact=False)


def _guess_type(reference: Reference) -> str:
    match reference:
        case HubFile(_, path):
            quant = parse_quant(path)
        case HubQuant(_, quant):
            pass
        case _:
            quant = None
    quant = (quant or "").upper().removeprefix("UD-")
    return next((kind.name for kind in GGML_TYPES.values() if f"{quant}_".startswith(f"{kind.name}_")), "Q4_K")


def read_facts(source: Source, hub: Hub) -> ModelFacts:
    """From the header or config of a model, read by ranges if it is not downloaded, or from an earlier reading.

    Raises InvalidModelFile, HubError, CacheError.
    """
    stored = _path(source.model) if isinstance(source, HubGguf | HubMlx) else None
    if stored is not None and (known := _load(stored)) is not None:
        return known
    facts = _describe(read_metadata(source, hub))
    if stored is not None:
        with suppress(OSError):
            stored.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(stored, json.dumps(asdict(facts)))
    return facts


def _describe(model: ModelMetadata) -> ModelFacts:
    context = min(model.trained_context or DEFAULT_CONTEXT, DEFAULT_CONTEXT)
    needed = estimate_memory(model, context).total
    if not isinstance(model, Header):
        return ModelFacts(model.weight_bytes, needed, {}, None, mixture=False)
    parameters = sum(math.prod(tensor.shape) for tensor in model.tensors) / 1e9
    read = read_by_type(model, -1, count_blocks(model) or 1)
    return ModelFacts(model.weight_bytes, needed, read, parameters, bool(model.own("expert_count")))


def _path(model: RemoteModel) -> Path:
    name = hashlib.sha256("\n".join([model.repo, model.commit, *(file.path for file in model.files)]).encode())
    return calibration_folder() / f"facts-{_VERSION}-{name.hexdigest()[:24]}.json"


def _load(path: Path) -> ModelFacts | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return ModelFacts(**found) if isinstance(found, dict) and found["weights"] > 0 else None
    except (OSError, ValueError, TypeError, KeyError):
        return None
