"""A model in the forms in which engines load it."""

from __future__ import annotations

import math
import re
from pathlib import Path

from edgespec.errors import InvalidRequest
from edgespec.export.plan import Weights
from edgespec.formats.gguf import Header
from edgespec.formats.head_file import ModelMetadata
from edgespec.models.originals import find_original, read_folder_original, read_gguf_original
from edgespec.models.references import HubFile, HubQuant, HubRepo, LocalPath, Reference
from edgespec.models.registry import Registry, is_repository

_QUANTIZED = re.compile(r"(?:\b|_)(?:UD-)?(?:I?Q|NVFP)\d|\b\d[-_]?bit", re.IGNORECASE)


def describe_weights(
    reference: Reference,
    registry: Registry,
    *,
    path: Path | None = None,
    metadata: ModelMetadata | None = None,
    given: str | None = None,
    is_head: bool = False,
) -> Weights:
    """The model that `reference` names, which lies at `path` if it is on this machine.

    `given` is what the user says of its original weights. The base model that the file of a head or PARD model names is
    another model, and not its original. Raises InvalidRequest for a `given` that is neither a repository nor a folder.
    """
    if path is None and isinstance(reference, LocalPath):
        path = reference.path
    original, known_from = _find_original(reference, registry, path, metadata, given, is_head)
    if path is not None and not (isinstance(reference, HubRepo) and path.is_dir()):
        files: HubRepo | HubQuant | HubFile | LocalPath = LocalPath(path.absolute())
    else:
        assert isinstance(reference, HubRepo | HubQuant | HubFile)
        files = reference
    return Weights(reference, files, original, known_from, _is_quantized(reference, metadata), _count_rows(metadata))


def _find_original(
    reference: Reference,
    registry: Registry,
    path: Path | None,
    metadata: ModelMetadata | None,
    given: str | None,
    is_head: bool,
) -> tuple[str | None, str]:
    if given is not None:
        return _check_given(given), "you"
    if known := find_original(reference, registry, is_head=is_head):
        return known, "models.toml"
    if isinstance(metadata, Header):
        return (None if is_head else read_gguf_original(metadata)) or (None, "")
    if metadata is None:
        return None, ""
    if isinstance(metadata.config.get("quantization"), dict):
        return (None if is_head else read_folder_original(metadata)) or (None, "")
    if isinstance(reference, HubRepo):  # in half precision, as it was released
        return reference.repo, "its name"
    return (str(path.resolve()), "its path") if path is not None else (None, "")


def _check_given(text: str) -> str:
    if is_repository(text):
        return text
    folder = Path(text).expanduser()
    if (folder / "config.json").is_file():
        return str(folder.resolve())
    raise InvalidRequest(
        f"{text!a} is neither a repository nor a folder with config.json.",
        hint="Write USER/REPO, such as Qwen/Qwen3-32B.",
    )


def _is_quantized(reference: Reference, metadata: ModelMetadata | None) -> bool:
    """Whether most weights have 8 bits or fewer; MXFP4, in which models are released, does not count."""
    if isinstance(metadata, Header):
        n_weights = sum(math.prod(tensor.shape) for tensor in metadata.tensors)
        return 8 * metadata.weight_bytes < 12 * n_weights and not any(
            tensor.type.name == "MXFP4" for tensor in metadata.tensors
        )
    named = bool(_QUANTIZED.search(str(reference)))
    stated = named if metadata is None else isinstance(metadata.config.get("quantization"), dict)
    return stated and "mxfp4" not in str(reference).lower()


def _count_rows(metadata: ModelMetadata | None) -> int | None:
    """Rows of the embedding, `vocab_size` of config.json, if the metadata says it."""
    if isinstance(metadata, Header):
        return next((tensor.shape[-1] for tensor in metadata.tensors if tensor.name == "token_embd.weight"), None)
    return metadata.integer("vocab_size") if metadata is not None else None
