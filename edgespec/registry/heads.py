"""Trained heads among the files of models: which files are heads, and which repository has the one that is missing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from edgespec.errors import EdgespecError
from edgespec.formats.gguf import Header
from edgespec.formats.head_file import read_head
from edgespec.hub.reference import Reference
from edgespec.registry.schema import Registry

_ARCHITECTURES = (b"eagle3", b"dflash", b"gemma4-assistant")  # of GGUF files that hold a head alone
_MTP_KEY = b".nextn_predict_layers"
_FIRST_LAYER = b"blk.0."  # of tensors that a file of MTP layers alone does not have
_START_BYTES = 2**20  # of a GGUF file; converters write its hyperparameters before the vocabulary
_MAX_HEADER_BYTES = 2**24  # with a vocabulary of 260,000 tokens 10 MB
_PARTS = re.compile(r"(?:-\d{5}-of-\d{5})?\.gguf$")
_ENDING = re.compile(r"[-.](?:ud[-.])?(?:i?q\d|tq\d|mxfp\d|nvfp\d|bf16|f16|f32)[a-z0-9_]*$")
_SUFFIX = re.compile(r"-(?:mtp-)?gguf$|-mtp$")


def is_head(path: Path) -> bool:
    """Whether a file or folder holds a trained head and no model. False for what cannot be read.

    Of most GGUF files only the first MiB is read.
    """
    try:
        if path.is_file():
            if _names_head(start := _read_start(path, _START_BYTES)):
                return True
            if _MTP_KEY not in start or _FIRST_LAYER in _read_start(path, _MAX_HEADER_BYTES):
                return False
        head = read_head(path)
    except (EdgespecError, OSError):
        return False
    return head is not None and not head.in_target


def find_with_head(model: Header, name: str, registry: Registry) -> Reference | None:
    """The repository whose files of the same model hold an MTP head, by the model's names; None where none is known.

    `name` is what the user calls it.
    """
    names = set(_list_names(model, name))
    for entry in registry.entries.values():
        pair = entry.gguf
        if pair and pair.with_head and _normalize(getattr(pair.with_head, "repo", "")) in names:
            return pair.with_head
    return None


def _read_start(path: Path, n_bytes: int) -> bytes:
    with open(path, "rb") as file:
        return file.read(n_bytes)


def _names_head(start: bytes) -> bool:
    """Whether `general.architecture` is that of a head."""
    key = b"general.architecture\x08\x00\x00\x00"  # followed by the length of the text, in 8 bytes, and the text
    at = start.find(key)
    if at < 0:
        return False
    length = int.from_bytes(start[at + len(key) : at + len(key) + 8], "little")
    return start[at + len(key) + 8 :][:length] in _ARCHITECTURES


def _list_names(model: Header, name: str) -> Iterator[str]:
    """Names of a model: as it was given, of its file, and in its metadata."""
    repo = re.match(r"(?:hf:)?[^/]+/([^/:@]+)", name)
    stated = [model.metadata.get(f"general.{key}") for key in ("name", "basename", "base_model.0.name")]
    for each in (repo[1] if repo else "", name.rsplit("/", 1)[-1], model.name, *stated):
        if isinstance(each, str) and each:
            yield _normalize(each)


def _normalize(name: str) -> str:
    """'Qwen3.5-9B-MTP-GGUF' and 'Qwen3.5 9B' as 'qwen3.5-9b'."""
    found = name.rsplit("/", 1)[-1].lower()
    for pattern in (_PARTS, _ENDING, _SUFFIX):
        found = pattern.sub("", found)
    return re.sub(r"[\s_]+", "-", found)
