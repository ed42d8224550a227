"""Which files of a repository a reference means: a quantisation, all parts of a split file, or an MLX folder."""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass
from typing import Literal

from edgespec.errors import HubError
from edgespec.hub.errors import HubContext, no_such_file
from edgespec.hub.reference import HubFile, HubQuant, HubReference, is_gguf_name

Kind = Literal["gguf", "mlx"]

# What a repository without a stated quantisation gives: Q4_K_M, then the nearest in size.
PREFERRED = [
    "Q4_K_M",
    "UD-Q4_K_XL",
    "Q4_K_XL",
    "Q4_K_S",
    "Q4_K_L",
    "Q4_1",
    "Q4_0",
    "IQ4_NL",
    "IQ4_XS",
    "MXFP4",
    "Q5_K_S",
    "Q5_K_M",
    "Q5_0",
    "Q3_K_L",
    "Q3_K_M",
    "Q6_K",
    "Q8_0",
    "BF16",
    "F16",
    "F32",
]
MLX_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")

_QUANT = re.compile(r"(?:UD-)?(?:I?Q\d|TQ\d|MXFP\d|NVFP\d|BF16|F16|F32)[A-Z0-9_]*", re.IGNORECASE)
_SPLIT = re.compile(r"(?P<stem>.*)-(?P<part>\d{5})-of-(?P<parts>\d{5})\.gguf", re.IGNORECASE)
_BESIDE = re.compile(r"(?:^|/)(?:mmproj|imatrix|ggml-vocab)[^/]*$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a repository: `size` in bytes, `sha256` where the hub states one."""

    path: str
    size: int
    sha256: str | None


@dataclass(frozen=True, slots=True)
class Selection:
    """The files of one model, the one to open first in front."""

    kind: Kind
    files: tuple[RemoteFile, ...]


def select(reference: HubReference, listing: tuple[RemoteFile, ...], subject: HubContext) -> Selection:
    """The files `reference` means among `listing`; raises HubError naming what the repository has instead."""
    files = {file.path: file for file in listing if _is_safe(file.path)}
    if isinstance(reference, HubFile):
        if reference.path not in files:
            raise no_such_file(subject)
        return _with_parts(files[reference.path], files, subject)
    models = [file for file in files.values() if is_model_file(file.path)]
    if isinstance(reference, HubQuant):
        found = _of_quant(reference.quant, models)
        if found is None:
            raise HubError(f"{subject.repo} has no {reference.quant}.", hint=_offer(subject, models))
        return _with_parts(found, files, subject)
    if models:
        ranked = (_of_quant(quant, models) for quant in PREFERRED)
        smallest = min(models, key=lambda file: file.size)
        return _with_parts(next((file for file in ranked if file), smallest), files, subject)
    return _mlx(files, subject)


def part_names(path: str) -> tuple[str, ...]:
    """All part names of a split GGUF in order, or just `path` for one that is not split."""
    match = _SPLIT.fullmatch(path)
    if match is None:
        return (path,)
    parts = int(match["parts"])
    return tuple(f"{match['stem']}-{part:05}-of-{parts:05}.gguf" for part in range(1, parts + 1))


def quant_of(path: str) -> str | None:
    """The quantisation that a file name states, in upper case."""
    found = _QUANT.findall(path.rsplit("/", 1)[-1])
    return found[-1].upper() if found else None


def _is_safe(path: str) -> bool:
    return "\\" not in path and ":" not in path and all(part not in ("", ".", "..") for part in path.split("/"))


def is_model_file(path: str) -> bool:
    """True for GGUF files that open a language model: no projectors, no calibration data, no later parts."""
    if not is_gguf_name(path) or _BESIDE.search(path):
        return False
    split = _SPLIT.fullmatch(path)
    return split is None or int(split["part"]) == 1


def _of_quant(quant: str, models: list[RemoteFile]) -> RemoteFile | None:
    """The file whose name states `quant` as a whole word; the least nested and shortest name wins."""
    word = re.compile(rf"(?<![A-Za-z0-9_]){re.escape(quant)}(?![A-Za-z0-9_])", re.IGNORECASE)
    found = [file for file in models if word.search(file.path)]
    return min(found, key=lambda file: (file.path.count("/"), len(file.path), file.path), default=None)


def _with_parts(file: RemoteFile, files: dict[str, RemoteFile], subject: HubContext) -> Selection:
    names = part_names(file.path)
    missing = [name for name in names if name not in files]
    if missing:
        raise HubError(
            f"{subject.repo} has {file.path} without its part {missing[0]}.", hint="choose another quantisation"
        )
    return Selection("gguf", tuple(files[name] for name in names))


def _mlx(files: dict[str, RemoteFile], subject: HubContext) -> Selection:
    wanted = [file for file in files.values() if any(fnmatch.fnmatch(file.path, each) for each in MLX_PATTERNS)]
    wanted = [file for file in wanted if "/" not in file.path]
    weights = [file for file in wanted if file.path.endswith(".safetensors")]
    if not weights or "config.json" not in files:
        raise HubError(
            f"{subject.repo} holds neither GGUF files nor an MLX model.",
            hint="choose a repository with .gguf files, or with config.json and .safetensors",
        )
    small = [file for file in wanted if file not in weights]
    return Selection("mlx", tuple(sorted(small, key=_by_path) + sorted(weights, key=_by_path)))


def _by_path(file: RemoteFile) -> str:
    return file.path


def _offer(subject: HubContext, models: list[RemoteFile]) -> str:
    quants = sorted({quant for file in models if (quant := quant_of(file.path))})
    if not quants:
        return f"see {subject.endpoint}/{subject.repo}/tree/main"
    return f"it has {', '.join(quants[:20])}"
