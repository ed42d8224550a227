"""A model folder in the Hugging Face layout (config.json, safetensors, tokenizer), read without loading its weights."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from edgespec.errors import InvalidModelFile, reading
from edgespec.formats.gguf import ByteSource, FileSource
from edgespec.formats.head_config import read_config_head

_STATES = ("linear_attention", "mamba", "mamba2", "conv", "recurrent", "short_conv")  # layers without keys and values
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json", "*.tiktoken")
_PULL = "Pull it again, or name another folder."
_MAX_HEADER_BYTES = 100_000_000  # as the safetensors library has it


@dataclass(frozen=True)  # no slots: the vocabulary is cached on it
class Folder:
    """The contents of a model folder's small files; `weight_bytes` is the size of its safetensors."""

    path: Path
    name: str
    config: dict[str, Any]
    weight_bytes: int

    @property
    def text_config(self) -> dict[str, Any]:
        """The settings of the language model, which multimodal configs keep in their own table."""
        inner = self.config.get("text_config")
        return {**self.config, **inner} if isinstance(inner, dict) else self.config

    @property
    def trained_context(self) -> int | None:
        """Context size in tokens that the model was trained for, if stated."""
        return self.integer("max_position_embeddings") or self.integer("n_positions") or self.integer("max_seq_len")

    @property
    def quantization(self) -> str:
        """The quantization of the weights, such as '4 bits in groups of 64'."""
        found = self.config.get("quantization")
        if not isinstance(found, dict) or "bits" not in found:
            return str(self.text_config.get("torch_dtype") or self.text_config.get("dtype") or "none")
        mode = "" if found.get("mode") in (None, "affine") else f" ({found['mode']})"
        return f"{found.get('bits')} bits in groups of {found.get('group_size')}{mode}"

    def integer(self, key: str) -> int | None:
        """A positive integer of the config, or None."""
        found = self.text_config.get(key)
        return found if isinstance(found, int) and not isinstance(found, bool) and found > 0 else None

    @property
    def layer_kv_elements(self) -> int:
        """Elements in the KV cache of one layer with attention at one position: keys and values, or latents."""
        if latent := self.integer("kv_lora_rank"):
            return latent + (self.integer("qk_rope_head_dim") or 0)
        heads = self.integer("num_attention_heads") or self.integer("n_head") or 1
        head = self.integer("head_dim") or (self.integer("hidden_size") or self.integer("n_embd") or 0) // heads
        return 2 * head * (self.integer("num_key_value_heads") or heads)

    def kv_elements(self, context: int) -> int:
        """Elements in the KV cache at `context` tokens: keys and values, or latents, of all layers with attention."""
        layers = self.integer("num_hidden_layers") or self.integer("n_layers") or self.integer("n_layer") or 0
        width = self.layer_kv_elements
        kinds = self.text_config.get("layer_types")
        if not isinstance(kinds, list):
            return width * context * (layers // (self.integer("full_attention_interval") or 1))
        window = min(context, (self.integer("sliding_window") or context) + 256)
        return width * sum(window if kind == "sliding_attention" else context for kind in kinds if kind not in _STATES)

    @property
    def vocabulary(self) -> dict[int, str] | None:
        """Token by id, from tokenizer.json; None if there is no such file."""
        return self._tokenizer[0]

    @property
    def control_tokens(self) -> frozenset[int]:
        """Ids that tokenizer.json marks as special; empty if there is no such file."""
        return self._tokenizer[1]

    @cached_property
    def _tokenizer(self) -> tuple[dict[int, str] | None, frozenset[int]]:
        file = self.path / "tokenizer.json"
        if not file.is_file():
            return None, frozenset()
        content = read_json(file)
        model = content.get("model")
        entries = model.get("vocab") if isinstance(model, dict) else None
        if isinstance(entries, dict):
            tokens = {i if isinstance(i, int) else -1: token for token, i in entries.items()}
        elif isinstance(entries, list):
            tokens = {i: entry[0] for i, entry in enumerate(entries) if isinstance(entry, list) and entry}
        else:
            raise InvalidModelFile(f"{file} holds no vocabulary.", hint=_PULL)
        if not all(i >= 0 and isinstance(token, str) for i, token in tokens.items()):
            raise InvalidModelFile(f"{file} has tokens without an id.", hint=_PULL)
        added = content.get("added_tokens")
        marks = [each for each in (added if isinstance(added, list) else ()) if isinstance(each, dict)]
        marks = [each for each in marks if isinstance(each.get("id"), int)]
        tokens |= {each["id"]: str(each.get("content")) for each in marks}
        return tokens, frozenset(each["id"] for each in marks if each.get("special"))


def read_config(path: Path, name: str, weight_bytes: int) -> Folder:
    """A folder that may lack its weights. Raises InvalidModelFile for a config of no model and no head, CacheError."""
    config = read_json(path / "config.json")
    if not isinstance(config.get("model_type"), str) and read_config_head(config, {}) is None:
        raise InvalidModelFile(f"{path / 'config.json'} names no model_type.", hint=_PULL)
    return Folder(path, name, config, weight_bytes)


def read_folder(path: Path) -> Folder:
    """A model folder with every shard of its index, none truncated. Raises InvalidModelFile, CacheError."""
    weights = sorted(path.glob("model*.safetensors"))
    index = path / INDEX
    if index.is_file() and (missing := find_missing_shards(path, read_json(index))):
        raise InvalidModelFile(f"'{path}' lacks {missing[0]}, which its index names.", hint=_PULL)
    if not weights:
        refuse_adapter(path)
        raise InvalidModelFile(f"'{path}' holds no model*.safetensors.", hint=_PULL)
    if not any(any(path.glob(name)) for name in _TOKENIZERS):
        raise InvalidModelFile(f"'{path}' holds no tokenizer.", hint=_PULL)
    for file in weights:
        if not read_safetensors_shapes(FileSource(file), str(file)):
            raise InvalidModelFile(f"{file} holds no tensors.", hint=_PULL)
    return read_config(path, path.name, sum(file.stat().st_size for file in weights))


INDEX = "model.safetensors.index.json"


def find_missing_shards(folder: Path, index: dict[str, Any]) -> list[str]:
    """The files that the index of a model folder names and that are not there.

    An index of which no file is there is left over from other weights, which a quantization has replaced: mlx-lm reads
    the files that it finds and no index.
    """
    mapped = index.get("weight_map")
    named = {str(each) for each in mapped.values()} if isinstance(mapped, dict) else set()
    missing = sorted(name for name in named if not (folder / name).is_file())
    return missing if len(missing) < len(named) else []


ADAPTER_CONFIG = "adapter_config.json"
_MERGED_BY = {"adapters.safetensors": "mlx_lm.fuse", "adapter_model.safetensors": "PEFT's merge_and_unload"}


def refuse_adapter(path: Path) -> None:
    """Raise InvalidModelFile for a folder that holds a LoRA adapter in place of a model."""
    if not (path / ADAPTER_CONFIG).is_file():
        return
    config = read_json(path / ADAPTER_CONFIG)
    base = config.get("model") or config.get("base_model_name_or_path")
    named = f" {base[:200]!a}" if isinstance(base, str) else ""
    tool = next((tool for name, tool in _MERGED_BY.items() if (path / name).is_file()), "the program that trained it")
    raise InvalidModelFile(
        f"'{path}' is a LoRA adapter, which changes the weights of another model.",
        hint=f"Merge it into its base model{named} with {tool}, and open the folder that it writes.",
    )


def read_safetensors_shapes(source: ByteSource, name: str) -> dict[str, tuple[int, ...]]:
    """Shape by name of the tensors of a local or remote file, of which only the header is read.

    `name` is the file's name in messages. The safetensors library reads no remote files. Raises InvalidModelFile,
    CacheError.
    """
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
                raise InvalidModelFile(f"{name} is cut short.", hint=_PULL)
    raise _damaged(name)


def _damaged(name: str) -> InvalidModelFile:
    return InvalidModelFile(f"{name} is damaged: it has no header of safetensors.", hint=_PULL)


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object of a small file. Raises InvalidModelFile, CacheError."""
    try:
        with reading(file):
            if not file.exists():
                raise InvalidModelFile(f"{file.parent} lacks {file.name}.", hint=_PULL)
            content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InvalidModelFile(f"{file} is not valid JSON: {error}.", hint=_PULL) from error
    if not isinstance(content, dict):
        raise InvalidModelFile(f"{file} holds no JSON object.", hint=_PULL)
    return content
