"""A draft model that is trained: opened from its file, changed in single precision, saved in the file's own format."""

from __future__ import annotations

import errno
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.tuner.lora import LoRALinear
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import dequantize_model, load_model

from edgespec.backends.llamacpp.quantize import quantize_rows
from edgespec.backends.mlx.library import map_errors
from edgespec.backends.mlx.model import explain_errors
from edgespec.errors import BackendError, CacheError, DraftRefused, InvalidModelFile, reason_of
from edgespec.files import new_folder, replace_file
from edgespec.formats.ggml_types import GGML_IDS, GGML_NAMES, GGML_TYPES
from edgespec.formats.gguf_config import ROPE_FACTORS, read_gguf_config, to_folder_name
from edgespec.formats.gguf_validate import read_file
from edgespec.formats.head_file import read_head
from edgespec.formats.mlx_folder import read_folder

LORA_SCALE = 20.0  # by which the product of the two small matrices is multiplied; mlx-lm's default
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, None)  # None: of NumPy, which does not tell


class Student(ABC):
    """A draft model as a trainable network. The thread that opened it uses it.

    network  mlx-lm's module in single precision: tokens int32 [B, T] to logits [B, T, V]
    """

    network: Any

    @staticmethod
    def open(path: Path) -> Student:
        """Open a GGUF file of a llama, qwen2 or qwen3, or a folder that mlx-lm opens; nothing is trainable yet.

        Raises InvalidModelFile, DraftRefused for a head and a mixture, BackendError, CacheError.
        """
        if not path.exists():
            raise InvalidModelFile(f"there is no model at {path}.", hint="Check the path of the draft model.")
        head = read_head(path)
        if head is not None and not head.in_target:
            raise DraftRefused(
                f"{path.name} is a head ({head.kind}), not a draft model.", hint="Name the draft model of the target."
            )
        with map_errors():
            student = FolderStudent(path) if path.is_dir() else GgufStudent(path)
            student.network.freeze()
        return student

    def train_lora(self, rank: int) -> None:
        """Make two matrices of `rank` trainable beside each linear layer of the blocks, and nothing else.

        They are drawn by mx.random, and change nothing until they are trained. Called once, on a student that trains
        nothing yet.
        """
        config = {"rank": rank, "scale": LORA_SCALE, "dropout": 0.0}
        linear_to_lora_layers(self.network, len(self.network.layers), config)
        self.network.train()

    def train_all(self) -> None:
        self.network.unfreeze()
        self.network.train()

    @property
    def vocab_size(self) -> int:
        """V, the number of tokens that it scores."""
        return int(self.network.args.vocab_size)

    def save(self, path: Path) -> None:
        """Write the trained model in the format that it was opened from, at once or not at all, for its owner only.

        A file replaces one that exists; a folder must not exist. LoRA's matrices become a part of the weights. Raises
        BackendError for weights that are not finite, CacheError if the path cannot be written.
        """
        with map_errors():
            fused = [(name, each.fuse()) for name, each in self.network.named_modules() if isinstance(each, LoRALinear)]
            self.network.update_modules(tree_unflatten(fused))
            weights = dict(tree_flatten(self.network.parameters()))
            require_finite(weights.values())
        with report_unwritable(path):
            self._write(weights, path)

    @abstractmethod
    def _write(self, weights: Mapping[str, Any], path: Path) -> None:
        """Write the base with these weights, by name, at once or not at all. Raises OSError, BackendError."""


def require_finite(weights: Iterable[Any]) -> None:
    if not all(mx.isfinite(array).all().item() for array in weights):
        raise BackendError(
            "the trained weights are not finite numbers, so nothing was saved.", hint="Train with a lower rate."
        )


@contextmanager
def report_unwritable(path: Path) -> Iterator[None]:
    """Raise CacheError for an OSError in the block."""
    try:
        yield
    except OSError as error:
        reason = "the disk is full" if error.errno in _FULL else reason_of(error)
        raise CacheError(
            f"{path} cannot be written: {reason}.", hint="Free some disk space, or choose another folder."
        ) from error


def write_tensors(file: Path, arrays: dict[str, Any], metadata: dict[str, str]) -> None:
    """Write a file of safetensors. Raises OSError, BackendError."""
    with map_errors():
        mx.eval(arrays)
    try:
        mx.save_safetensors(str(file), arrays, metadata)
    except RuntimeError as error:  # all that is left to fail is the disk; MLX does not tell why
        raise OSError(errno.ENOSPC, reason_of(error)) from error


_COPIED = ("*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt")
_INDEX = "model.safetensors.index.json"  # of several files; one is written


class FolderStudent(Student):
    """A folder with config.json and safetensors, whose quantized weights are in single precision too."""

    def __init__(self, path: Path) -> None:
        """Raises InvalidModelFile for a folder that mlx-lm cannot open, DraftRefused, CacheError."""
        read_folder(path)
        self._path = path
        self._arrays: dict[str, Any] = {}  # by the names of the files; read when they are used
        with explain_errors(path):
            self.network = load_model(path, lazy=True, strict=True, trust_remote_code=False)[0]
            for file in sorted(path.glob("model*.safetensors")):
                arrays, self._metadata = mx.load(str(file), return_metadata=True)
                self._arrays |= arrays
        self._check()
        self._quantized = {
            name: (module.group_size, module.bits, module.mode)
            for name, module in self.network.named_modules()
            if isinstance(module, nn.QuantizedLinear | nn.QuantizedEmbedding)
        }
        self.network.set_dtype(mx.float32)  # scales, before they multiply
        dequantize_model(self.network)
        self.network.set_dtype(mx.float32)
        for name, array in tree_flatten(self.network.parameters()):
            if array.dtype != mx.float32:
                raise self._refuse(f"the weights of {name} are packed")
        mx.eval(self.network.parameters())

    def _write(self, weights: Mapping[str, Any], path: Path) -> None:
        """Write a folder with these weights, by name, and the config and tokenizer of the base.

        Tensors have the types of the base; matrices that were quantized are quantized again, unless they did not
        change. Raises OSError, also if `path` is a folder with files.
        """
        arrays: dict[str, Any] = {}
        for name, array in self._arrays.items():
            part, _, kind = name.rpartition(".")
            if part in self._quantized and kind == "weight":
                arrays |= self._quantize(part, weights[name])
            elif name in weights:
                arrays[name] = weights[name].astype(array.dtype)
        with new_folder(path) as partial:
            for file in {each for pattern in _COPIED for each in self._path.glob(pattern)}:
                if file.name != _INDEX:
                    shutil.copyfile(file, partial / file.name)
            write_tensors(partial / "model.safetensors", arrays, self._metadata)
            for file in partial.iterdir():
                file.chmod(0o600)

    def _check(self) -> None:
        """Raise DraftRefused for a mixture, and for a network that mlx-lm composes of other tensors than the files'."""
        if any(isinstance(each, SwitchLinear | QuantizedSwitchLinear) for each in self.network.modules()):
            raise self._refuse("it is a mixture of experts")
        for name, array in tree_flatten(self.network.parameters()):
            if name not in self._arrays or self._arrays[name].shape != array.shape:
                raise self._refuse(f"mlx-lm changes its tensor {name} when it loads it")

    def _refuse(self, why: str) -> DraftRefused:
        hint = "Use a draft of the llama, qwen2 or qwen3 architecture."
        return DraftRefused(f"{self._path.name} cannot be trained: {why}.", hint=hint)

    def _quantize(self, part: str, weight: Any) -> dict[str, Any]:
        """The tensors of a quantized matrix: those of the base if it did not change."""
        names = [f"{part}.{kind}" for kind in ("weight", "scales", "biases")]
        base = [self._arrays[name] for name in names if name in self._arrays]
        group, bits, mode = self._quantized[part]
        wide = [each.astype(mx.float32) if mx.issubdtype(each.dtype, mx.floating) else each for each in base]
        before = mx.dequantize(*wide, group_size=group, bits=bits, mode=mode).astype(mx.float32)
        if not mx.array_equal(before, weight):
            dtype = base[1].dtype if mx.issubdtype(base[1].dtype, mx.floating) else weight.dtype
            base = mx.quantize(weight.astype(dtype), group_size=group, bits=bits, mode=mode)
        return dict(zip(names, base, strict=False))


_COARSE = ("IQ1", "IQ2", "TQ")  # types that ruin a matrix without an importance matrix, or need training of their own
_Q8_0 = GGML_NAMES["Q8_0"]


class GgufStudent(Student):
    """A GGUF file. A llama's Q and K rows keep the file's order."""

    def __init__(self, path: Path) -> None:
        """Raises InvalidModelFile for a file that is damaged or of another architecture, CacheError."""
        self._header = read_file(path)
        if self._header.metadata.get("split.count", 1) != 1:
            raise InvalidModelFile(
                f"{path.name} is one part of a split model.", hint="Join the parts: llama-gguf-split --merge."
            )
        config = read_gguf_config(self._header)
        self._reader = gguf.GGUFReader(path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        with explain_errors(path):
            self.network = _make_network(config, {name: self._read(name) for name in self._tensors})

    def _write(self, weights: Mapping[str, Any], path: Path) -> None:
        """Write the network with these weights, by name, to a GGUF file with the metadata of the base.

        Tensors whose weights did not change are copied. Raises OSError.
        """
        rewrite_gguf(self._reader, path, lambda name: self._find_change(name, weights))

    def _read(self, name: str) -> npt.NDArray[np.float32]:
        tensor = self._tensors[name]
        return gguf.quants.dequantize(tensor.data, tensor.tensor_type)

    def _find_change(self, name: str, weights: Mapping[str, Any]) -> npt.NDArray[np.float32] | None:
        """The new weights of a tensor; None if they are those of the file."""
        if name == ROPE_FACTORS:
            return None
        found = np.array(weights[to_folder_name(name)])
        return None if np.array_equal(self._read(name), found) else found


def rewrite_gguf(reader: Any, path: Path, change: Callable[[str], npt.NDArray[np.float32] | None]) -> None:
    """Write the file of a GGUFReader to `path` for its owner only, with the tensors that `change` returns by name.

    They keep their type, and are Q8_0 if it is too coarse to be quantized without an importance matrix. Raises
    OSError.
    """
    with replace_file(path, 0o600) as partial:  # it has learned from the user's texts
        writer = gguf.GGUFWriter(partial, reader.fields["general.architecture"].contents())
        copy_fields(writer, reader, lambda name: name != "general.alignment")
        for tensor in reader.tensors:
            data, kind = tensor.data, GGML_TYPES[tensor.tensor_type]
            changed = change(tensor.name)
            if changed is not None:
                kind = _Q8_0 if kind.name.startswith(_COARSE) else kind
                data = quantize_rows(changed.reshape(-1, changed.shape[-1]), kind)
                data = data.reshape(*changed.shape[:-1], -1)
            writer.add_tensor(tensor.name, data, raw_dtype=gguf.GGMLQuantizationType(GGML_IDS[kind.name]))
        finish_gguf(writer)


class _FactoredRope(nn.Module):  # type: ignore[misc]
    """Rotary positions whose wavelengths are multiplied by factors [dims / 2]."""

    def __init__(self, dims: int, base: float, *, traditional: bool, factors: npt.NDArray[np.float32]) -> None:
        super().__init__()
        self._dims, self._traditional = dims, traditional
        self._wavelengths = base ** (mx.arange(0, dims, 2, dtype=mx.float32) / dims) * mx.array(factors)

    def __call__(self, x: Any, offset: Any = 0) -> Any:
        return mx.fast.rope(
            x, self._dims, traditional=self._traditional, base=None, scale=1.0, offset=offset, freqs=self._wavelengths
        )


def _make_network(config: dict[str, Any], tensors: dict[str, npt.NDArray[np.float32]]) -> Any:
    """Raises KeyError for a tensor that the architecture does not have, ValueError for one missing or misshapen."""
    factors = tensors.pop(ROPE_FACTORS, None)
    module = import_module(f"mlx_lm.models.{config['model_type']}")
    network = module.Model(module.ModelArgs.from_dict(config))
    network.load_weights([(to_folder_name(name), mx.array(each)) for name, each in tensors.items()], strict=True)
    if factors is not None:
        rope = _FactoredRope(
            config["head_dim"], config["rope_theta"], traditional=config["rope_traditional"], factors=factors
        )
        for layer in network.layers:
            layer.self_attn.rope = rope
    return network


def finish_gguf(writer: Any) -> None:
    """Write the file of a GGUFWriter. Raises OSError."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def copy_fields(writer: Any, reader: Any, is_copied: Callable[[str], bool]) -> None:
    """Add the metadata of a GGUFReader whose names `is_copied` picks, but the architecture, which a writer has."""
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture" and is_copied(name):
            _copy_field(writer, field)


def _copy_field(writer: Any, field: Any) -> None:
    """Add a metadata value with its type. An empty array is left out: the writer knows none."""
    kind, inner = field.types[0], field.types[-1]
    if kind != gguf.GGUFValueType.ARRAY:
        is_text = kind == gguf.GGUFValueType.STRING
        writer.add_key_value(field.name, field.parts[-1].tobytes() if is_text else field.contents(), kind)
    elif field.data:
        is_text = inner == gguf.GGUFValueType.STRING
        items = [field.parts[i].tobytes() for i in field.data] if is_text else field.contents()
        writer.add_key_value(field.name, items, kind, inner)
