"""The files of a repository that a reference names: a quantisation, all parts of a split file, or an MLX folder."""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

from edgespec.errors import HubError
from edgespec.formats.mlx_folder import ADAPTER_CONFIG
from edgespec.models.hub_errors import HubContext, missing_file_error
from edgespec.models.references import HubFile, HubQuant, HubReference, is_gguf_name, is_safe

Kind = Literal["gguf", "mlx"]
# The choice for a reference without a quantisation: Q4_K_M, then the nearest in size.
PREFERRED = [
    "Q4_K_M", "UD-Q4_K_XL", "Q4_K_XL", "Q4_K_S", "Q4_K_L", "Q4_0", "Q4_1", "IQ4_NL", "IQ4_XS", "MXFP4", "Q5_K_S",
    "Q5_K_M", "Q5_0", "Q3_K_L", "Q3_K_M", "Q6_K", "Q8_0", "BF16", "F16", "F32",
]  # fmt: skip
MLX_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
_QUANT = re.compile(r"(?:UD-)?(?:I?Q\d|TQ\d|MXFP\d|NVFP\d|BF16|F16|F32)[A-Z0-9_]*", re.IGNORECASE)
_SPLIT = re.compile(r"(?P<stem>.*)-(?P<part>\d{5})-of-(?P<parts>\d{5})\.gguf", re.IGNORECASE)
_COMPANION = re.compile(r"(?:^|/)(?:mmproj|imatrix|ggml-vocab)[^/]*$", re.IGNORECASE)
_HEAD = re.compile(r"(?:^|/)mtp-[^/]*$", re.IGNORECASE)  # MTP layers in a file beside their model's


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a repository: `size` in bytes; `etag`, if the hub states one, is a sha256 or a git hash."""

    path: str
    size: int
    etag: str | None


Selection = tuple[Kind, tuple[RemoteFile, ...]]
"""The files of one model; the first is the one to open."""


def select_files(reference: HubReference, listing: tuple[RemoteFile, ...], context: HubContext) -> Selection:
    """The files of `listing` that `reference` names. Raises HubError, whose hint names the alternatives."""
    files = {file.path: file for file in listing if is_safe(file.path)}
    if isinstance(reference, HubFile):
        if reference.path not in files:
            raise missing_file_error(context)
        return _select_parts(files[reference.path], files, context)
    models = [file for file in files.values() if is_model_file(file.path)]
    models = [file for file in models if not _HEAD.search(file.path)] or models
    wanted = [reference.quant] if isinstance(reference, HubQuant) else PREFERRED
    found = next(filter(None, (_find_quant(quant, models) for quant in wanted)), None)
    if found is None and isinstance(reference, HubQuant):
        raise HubError(f"{context.repo} has no {reference.quant}.", hint=_suggest_quants(context, models))
    if not models:
        return _select_mlx(files, context)
    return _select_parts(found or min(models, key=attrgetter("size")), files, context)


def list_parts(path: str) -> tuple[str, ...]:
    """The names of all parts of a split GGUF file, in order; only `path` for a single file."""
    if (match := _SPLIT.fullmatch(path)) is None:
        return (path,)
    parts = int(match["parts"])
    return tuple(f"{match['stem']}-{part:05}-of-{parts:05}.gguf" for part in range(1, parts + 1))


def parse_quant(path: str) -> str | None:
    """The quantisation in a file name, in upper case; None if there is none."""
    found = _QUANT.findall(path.rsplit("/", 1)[-1])
    return found[-1].upper() if found else None


def is_model_file(path: str) -> bool:
    """True for GGUF files of a language model; False for projectors, calibration data and later parts."""
    if not is_gguf_name(path) or _COMPANION.search(path):
        return False
    split = _SPLIT.fullmatch(path)
    return split is None or int(split["part"]) == 1


def _find_quant(quant: str, models: list[RemoteFile]) -> RemoteFile | None:
    """The file with `quant` as a whole word in its name; of several, the least nested and shortest one."""
    word = re.compile(rf"(?<![A-Za-z0-9_]){re.escape(quant)}(?![A-Za-z0-9_])", re.IGNORECASE)
    found = [file for file in models if word.search(file.path)]
    return min(found, key=lambda file: (file.path.count("/"), len(file.path), file.path), default=None)


def _select_parts(file: RemoteFile, files: dict[str, RemoteFile], context: HubContext) -> Selection:
    names = list_parts(file.path)
    missing = [name for name in names if name not in files]
    if missing:
        raise HubError(
            f"{context.repo} has {file.path} without its part {missing[0]}.", hint="Choose another quantisation."
        )
    return "gguf", tuple(files[name] for name in names)


def _select_mlx(files: dict[str, RemoteFile], context: HubContext) -> Selection:
    named = [file for file in files.values() if "/" not in file.path]
    wanted = [file for file in named if any(fnmatch.fnmatch(file.path, each) for each in MLX_PATTERNS)]
    wanted.sort(key=lambda file: (file.path.endswith(".safetensors"), file.path))
    if ADAPTER_CONFIG in files and "config.json" not in files:
        raise HubError(
            f"{context.repo} holds a LoRA adapter, which changes the weights of another model.",
            hint="Choose a repository of that model, into which the adapter is merged.",
        )
    if not wanted or not wanted[-1].path.endswith(".safetensors") or "config.json" not in files:
        raise HubError(
            f"{context.repo} holds neither GGUF files nor an MLX model.",
            hint="Choose a repository with .gguf files, or with config.json and .safetensors.",
        )
    return "mlx", tuple(wanted)


def _suggest_quants(context: HubContext, models: list[RemoteFile]) -> str:
    quants = sorted({quant for file in models if (quant := parse_quant(file.path))})
    if not quants:
        return f"See its files at {context.endpoint}/{context.repo}/tree/main"
    return f"Choose one of {', '.join(quants[:20])}."
