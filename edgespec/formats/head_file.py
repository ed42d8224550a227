"""The head in a file or folder, whatever its format; weights are not read and nothing in it is run."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from edgespec.errors import InvalidModelFile
from edgespec.formats.gguf import MAGIC, read_header
from edgespec.formats.gguf_reader import ByteSource, FileSource
from edgespec.formats.head_config import read_config_head
from edgespec.formats.head_gguf import read_gguf_head
from edgespec.formats.head_tensors import HEAD_HINT
from edgespec.formats.heads import HeadSpec
from edgespec.formats.mlx_folder import read_json
from edgespec.formats.torch_pickle import read_pickled_shapes

_MAX_HEADER_BYTES = 100_000_000  # as the safetensors library has it
PICKLES = ("pytorch_model*.bin", "*lm_head*.pt", "model*.pt")


def read_head(path: Path) -> HeadSpec | None:
    """The head in a GGUF file or a folder with config.json; None where there is none, or nothing at all.

    Of a split GGUF file only the given part is read: join the headers and call `read_gguf_head`. `layers` are what the
    format documents (see head_config.py), which a probe of the head may correct. Raises InvalidModelFile, CacheError.
    """
    if path.is_dir():
        config = path / "config.json"
        return read_config_head(read_json(config) if config.is_file() else {}, read_folder_shapes(path))
    if not path.is_file():
        return None
    source = FileSource(path)
    return read_gguf_head(read_header(source, path.name)) if source.read(0, len(MAGIC)) == MAGIC else None


def read_folder_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shape by name of the tensors in a folder's safetensors, or else in its pickles.

    Raises InvalidModelFile, CacheError.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for file in find_weights(folder):
        shapes |= read_safetensors_shapes(file) if file.suffix == ".safetensors" else read_pickled_shapes(file)
    return shapes


def find_weights(folder: Path) -> list[Path]:
    """The safetensors in a folder, or else its pickles, which formats.torch_pickle reads."""
    found = sorted(folder.glob("*.safetensors"))
    return found or sorted({file for pattern in PICKLES for file in folder.glob(pattern)})


def read_safetensors_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Shape by name of the tensors of one file, of which only the header is read. Raises InvalidModelFile, CacheError.

    The safetensors library comes only with MLX.
    """
    return read_shapes(FileSource(file), str(file))


def read_shapes(source: ByteSource, name: str) -> dict[str, tuple[int, ...]]:
    """As read_safetensors_shapes, of a local or remote file; `name` is the file's name in messages."""
    start = source.read(0, 8)
    length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
    if not 0 < length <= min(_MAX_HEADER_BYTES, source.size - 8):
        raise _damaged(name)
    try:
        header = json.loads(source.read(8, length))
    except (ValueError, RecursionError):
        raise _damaged(name) from None
    if not isinstance(header, dict):
        raise _damaged(name)
    data_bytes = source.size - 8 - length
    return {key: _check_tensor(name, entry, data_bytes) for key, entry in header.items() if key != "__metadata__"}


def _check_tensor(name: str, entry: object, data_bytes: int) -> tuple[int, ...]:
    """The shape of an entry of the header, if its bytes lie inside the file."""
    match entry:
        case {"shape": [*shape], "data_offsets": [int(start), int(end)]}:
            if all(type(size) is int and size >= 0 for size in shape) and 0 <= start <= end:
                if end <= data_bytes:
                    return tuple(shape)
                raise InvalidModelFile(f"{name} is cut short.", hint=HEAD_HINT)
    raise _damaged(name)


def _damaged(name: str) -> InvalidModelFile:
    return InvalidModelFile(f"{name} is damaged: it has no header of safetensors.", hint=HEAD_HINT)
