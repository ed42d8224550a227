"""What decoding a model costs, from its header or, where that was not read, from the number of its parameters.

A header at the hub is several MB, mostly vocabulary. What follows from it is stored by repository and commit.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from edgespec.backends.llamacpp.shape import count_blocks
from edgespec.backends.options import DEFAULT_CONTEXT
from edgespec.controller.store import calibration_folder
from edgespec.files import write_atomically
from edgespec.formats.gguf import Header
from edgespec.formats.metadata import ModelMetadata
from edgespec.hub.cache import RemoteModel
from edgespec.hub.hub import Hub
from edgespec.planner.memory import estimate_memory
from edgespec.planner.speed import read_bytes
from edgespec.registry.about import About
from edgespec.registry.resolve import HubGguf, HubMlx, Source, read_metadata

_VERSION = 1  # of the stored facts
_BITS = 4.85  # a weight of a 4-bit model, the mean of Q4_K_M files of 7B to 70B
_ADDED = 1.15  # memory over weights with a context of 8,192 tokens, where no header says more


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Sizes in bytes.

    weights     of all tensors, or of the files
    needed      of memory with a context of 8,192 tokens, or the trained one if that is shorter
    read        of the weights that a forward of one row reads
    parameters  in billions; None where nothing says
    kind        the type of most weights; None of MLX models, whose speed is not estimated
    mixture     whether rows may route to different experts
    exact       read from the header, not derived from the number of parameters
    """

    weights: int
    needed: int
    read: float
    parameters: float | None
    kind: str | None
    mixture: bool
    exact: bool = True


def guess_facts(about: About, size: int | None = None) -> ModelFacts | None:
    """From the parameters that the registry states, and the size of the files if that is known; None without either."""
    if size is None and about.parameters is None:
        return None
    weights = size if size is not None else round((about.parameters or 0) * 1e9 * _BITS / 8)
    share = about.active / about.parameters if about.active and about.parameters else 1.0
    return ModelFacts(
        weights, round(weights * _ADDED), weights * share, about.parameters, "Q4_K", about.active is not None, False
    )


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
        return ModelFacts(model.weight_bytes, needed, model.weight_bytes, None, None, mixture=False)
    bytes_by_type: Counter[str] = Counter()
    for tensor in model.tensors:
        bytes_by_type[tensor.type.name] += tensor.nbytes
    kind = bytes_by_type.most_common(1)[0][0] if bytes_by_type else None
    parameters = sum(math.prod(tensor.shape) for tensor in model.tensors) / 1e9
    blocks = count_blocks(model) or 1
    return ModelFacts(
        model.weight_bytes, needed, read_bytes(model, -1, blocks), parameters, kind, bool(model.own("expert_count"))
    )


def _path(model: RemoteModel) -> Path:
    name = hashlib.sha256("\n".join([model.repo, model.commit, *(file.path for file in model.files)]).encode())
    return calibration_folder() / f"facts-{_VERSION}-{name.hexdigest()[:24]}.json"


def _load(path: Path) -> ModelFacts | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return ModelFacts(**found) if isinstance(found, dict) and found["weights"] > 0 else None
    except (OSError, ValueError, TypeError, KeyError):
        return None
