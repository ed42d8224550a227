"""Files of heads for the tests: GGUF files of the gguf package, safetensors, and pickles made by hand."""

from __future__ import annotations

import io
import json
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import gguf
import numpy as np
from safetensors.numpy import save_file

TOKENS = tuple(f"token{number}" for number in range(300))
H = 8  # hidden size of the targets
V = len(TOKENS)

EAGLE3_LAYER = {
    "input_layernorm": (H,),
    "hidden_norm": (H,),
    "self_attn.q_proj": (H, 2 * H),
    "self_attn.k_proj": (H, 2 * H),
    "self_attn.v_proj": (H, 2 * H),
    "self_attn.o_proj": (H, H),
    "post_attention_layernorm": (H,),
    "mlp.gate_proj": (16, H),
    "mlp.up_proj": (16, H),
    "mlp.down_proj": (H, 16),
}
_GGUF_LAYER = ("attn_norm", "attn_norm_2", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate",
               "ffn_up", "ffn_down")  # fmt: skip


def eagle3_shapes(prefix: str = "midlayer.", *, draft_vocab: int = 32, features: int = 3) -> dict[str, tuple[int, ...]]:
    """Shapes of an EAGLE-3 head in safetensors."""
    layer = {f"{prefix}{name}.weight": shape for name, shape in EAGLE3_LAYER.items()}
    outside = {"fc.weight": (H, features * H), "norm.weight": (H,), "lm_head.weight": (draft_vocab, H)}
    return {**layer, **outside, "d2t": (draft_vocab,)}


def write_eagle3(path: Path, *, layers: Sequence[int] = (2, 16, 29), leave_out: str = "", **pairs: Any) -> Path:
    """A GGUF head as llama.cpp's converter writes it; `pairs` replace values of `eagle3.*`."""
    tensors = {f"blk.0.{name}.weight": shape for name, shape in zip(_GGUF_LAYER, EAGLE3_LAYER.values(), strict=True)}
    tensors |= {"fc.weight": (H, 3 * H), "output_norm.weight": (H,), "output.weight": (32, H)}
    tensors.pop(leave_out, None)
    settings: dict[str, Any] = {"embedding_length": H, "target_hidden_size": H, "norm_before_residual": True, **pairs}
    if layers:
        settings["target_layers"] = list(layers)
    return write(path, "eagle3", settings, tensors, d2t=np.arange(32, dtype=np.int64) * 3)


def write_dflash(path: Path, *, markov: bool = False, block: int | None = 16) -> Path:
    """A DFlash head, with DSpark's matrices where `markov`. `block` None: its size is not stated."""
    tensors: dict[str, tuple[int, ...]] = {"fc.weight": (H, 2 * H), "enc.output_norm.weight": (H,)}
    if markov:
        tensors |= {"markov_w1.weight": (V, 4), "markov_w2.weight": (V, 4)}
    settings: dict[str, Any] = {"embedding_length": H, "target_layers": [2, 10]}
    if block is not None:
        settings["block_size"] = block
    return write(path, "dflash", settings, tensors, mask=7)


def write_mtp(path: Path, *, trunk: bool) -> Path:
    """A model of two layers and an MTP layer, or a sidecar with the last alone."""
    blocks = range(3) if trunk else range(2, 3)
    tensors: dict[str, tuple[int, ...]] = {f"blk.{block}.attn_norm.weight": (H,) for block in blocks}
    tensors |= {"token_embd.weight": (V, H), "output_norm.weight": (H,), "blk.2.nextn.eh_proj.weight": (H, 2 * H)}
    settings = {"embedding_length": H, "block_count": 3, "nextn_predict_layers": 1}
    return write(path, "qwen3next", settings, tensors)


def write_assistant(path: Path) -> Path:
    """A Gemma 4 assistant of half its target's width."""
    tensors: dict[str, tuple[int, ...]] = {"token_embd.weight": (V, H // 2), "nextn.post_projection.weight": (H, 4)}
    settings = {"embedding_length": H // 2, "embedding_length_out": H, "nextn_predict_layers": 1}
    return write(path, "gemma4-assistant", settings, tensors)


def write(
    path: Path,
    architecture: str,
    settings: Mapping[str, Any],
    tensors: Mapping[str, tuple[int, ...]],
    *,
    d2t: np.ndarray | None = None,
    mask: int | None = None,
) -> Path:
    """A GGUF file of zeros with a vocabulary of 300 tokens and keys of `architecture`."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {"block_count": 1, "context_length": 2048, **settings}.items():
        name = f"{architecture}.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, list):
            writer.add_array(name, value)
        else:
            writer.add_uint32(name, value)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(list(TOKENS))
    if mask is not None:
        writer.add_mask_token_id(mask)
    for name, shape in tensors.items():
        writer.add_tensor(name, np.zeros(shape, np.float32))
    if d2t is not None:
        writer.add_tensor("d2t", d2t, raw_dtype=gguf.GGMLQuantizationType.I64)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_folder(path: Path, config: Mapping[str, Any] | None, shapes: Mapping[str, tuple[int, ...]]) -> Path:
    """A folder with config.json and one safetensors file of zeros."""
    path.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))
    if shapes:
        save_file({name: np.zeros(shape, np.float16) for name, shape in shapes.items()}, path / "model.safetensors")
    return path


class _Torch:
    """An object that pickles as a call of `function`, or as a global where there are no arguments."""

    def __init__(self, function: Any, arguments: tuple[Any, ...]) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.arguments


class Storage:
    """What torch's pickler names by a persistent id."""

    def __init__(self, kind: str, key: str, elements: int) -> None:
        self.identity = (kind, key, elements)


class _Name:
    """A global of a module that is not installed, such as torch.FloatStorage."""

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name


class _Pickler(pickle._Pickler):  # type: ignore[name-defined]  # in Python, so that save_global can be replaced
    dispatch: ClassVar = dict(pickle._Pickler.dispatch)  # type: ignore[attr-defined]

    def persistent_id(self, value: object) -> object:
        if isinstance(value, Storage):
            kind, key, elements = value.identity
            return ("storage", _Name("torch", kind), key, "cpu", elements)
        return None

    def save_name(self, value: _Name) -> None:
        self.write(b"c" + value.module.encode() + b"\n" + value.name.encode() + b"\n")

    dispatch[_Name] = save_name

    def save_call(self, value: _Torch) -> None:
        self.save(value.function)
        self.save(value.arguments)
        self.write(pickle.REDUCE)

    dispatch[_Torch] = save_call


def call(module: str, name: str, *arguments: Any) -> Any:
    """What pickles as a call of `module.name`, which need not exist."""
    return _Torch(_Name(module, name), arguments)


def stored(
    kind: str, key: str, elements: int, shape: tuple[Any, ...], strides: tuple[Any, ...], offset: Any = 0
) -> Any:
    """What pickles as a tensor of torch's."""
    hooks: OrderedDict[str, Any] = OrderedDict()
    arguments = (Storage(kind, key, elements), offset, shape, strides, False, hooks)
    return call("torch._utils", "_rebuild_tensor_v2", *arguments)


def make_pickle(value: object, protocol: int = 2) -> bytes:
    """`value` as torch.save pickles it."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol).dump(value)
    return buffer.getvalue()


def write_torch(
    path: Path,
    pickled: bytes,
    data: Mapping[str, bytes],
    *,
    compression: int = zipfile.ZIP_STORED,
    order: str = "little",
) -> Path:
    """A file as torch.save writes it: a zip of a pickle and an entry a storage."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/byteorder", order)
        for key, content in data.items():
            archive.writestr(f"archive/data/{key}", content)
        archive.writestr("archive/version", "3\n")
    return path


def write_state(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> Path:
    """A state dict of float32 zeros, with the attribute that torch adds to it."""
    state: OrderedDict[str, Any] = OrderedDict()
    data = {}
    for number, (name, shape) in enumerate(shapes.items()):
        size = int(np.prod(shape))
        strides = tuple(int(np.prod(shape[axis + 1 :])) for axis in range(len(shape)))
        state[name] = stored("FloatStorage", str(number), size, shape, strides)
        data[str(number)] = bytes(4 * size)
    state._metadata = OrderedDict({"": {"version": 1}})  # type: ignore[attr-defined]
    return write_torch(path, make_pickle(state), data)


def pack_header(header: object) -> bytes:
    """The start of a safetensors file."""
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text
