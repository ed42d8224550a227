"""What the file of a model tells of it: its size, family, parameters and quantization."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from edgespec.formats.gguf import Header
from edgespec.formats.head_file import ModelMetadata
from edgespec.models.file_selection import parse_quant


@dataclass(frozen=True, slots=True)
class FileFacts:
    """The facts of a model file. `n_bytes` is the size of the weights, `trained_context` is in tokens. `parameters` is
    None if shapes are not known.
    """

    format: str
    family: str
    n_bytes: int
    parameters: int | None
    quantization: str
    trained_context: int | None

    @property
    def parameter_size(self) -> str:
        """The number of parameters as people write it: '135M', '8.0B'."""
        if self.parameters is None:
            return ""
        billions = self.parameters / 1e9
        return f"{billions:.1f}B" if billions >= 1 else f"{self.parameters / 1e6:.0f}M"


def describe_file(metadata: ModelMetadata) -> FileFacts:
    """Derive the facts from a model's metadata. Raises InvalidModelFile for a file that names no architecture."""
    if not isinstance(metadata, Header):
        family = str(metadata.config.get("model_type", ""))
        return FileFacts(
            "safetensors", family, metadata.weight_bytes, None, metadata.quantization, metadata.trained_context
        )
    sizes: Counter[str] = Counter()
    for tensor in metadata.tensors:
        sizes[tensor.type.name] += tensor.nbytes
    largest = max(sizes, key=lambda name: sizes[name], default="")
    parameters = sum(math.prod(tensor.shape) for tensor in metadata.tensors)
    quantization = parse_quant(metadata.name) or largest
    return FileFacts(
        "gguf", metadata.architecture, metadata.weight_bytes, parameters, quantization, metadata.trained_context
    )
