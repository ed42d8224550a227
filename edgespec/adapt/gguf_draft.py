"""A draft model in a GGUF file as an mlx-lm network, and the file of the network once it is trained."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from edgespec.backends.llamacpp.quantize import quantize_rows
from edgespec.backends.mlx.model import load_error
from edgespec.errors import InvalidModelFile
from edgespec.files import replace_file
from edgespec.formats.ggml_types import GGML_IDS, GGML_TYPES, GgmlType
from edgespec.formats.gguf_config import ROPE_FACTORS, read_gguf_config
from edgespec.formats.gguf_validate import read_file
from edgespec.formats.tensor_names import to_folder_name

_MASK_TOKEN = gguf.Keys.Tokenizer.MASK_ID
_ALIGNMENT = 32  # bytes; GGUF's default
_COARSE = ("IQ1", "IQ2", "TQ")  # types that ruin a matrix without an importance matrix, or need training of their own
_Q8_0 = GGML_TYPES[GGML_IDS["Q8_0"]]


class GgufDraft:
    """`network` has the weights of the file in single precision. A llama's queries and keys stay in GGUF's order."""

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
        try:
            self.network = _make_network(config, {name: self._read(name) for name in self._tensors})
        except (KeyError, ValueError, NotImplementedError) as error:  # of tensors, shapes and types
            raise load_error(path, error) from error

    def save(self, weights: Mapping[str, Any], path: Path, mask_token: int | None) -> None:
        """Write the network with these weights, by name, to a GGUF file with the metadata of the base.

        Tensors whose weights did not change are copied. The others keep their type, and are Q8_0 where it is too coarse
        to be quantized without an importance matrix. Raises OSError.
        """
        changed = {name: found for name in self._tensors if (found := self._find_change(name, weights)) is not None}
        with replace_file(path) as partial:
            partial.chmod(0o600)  # it has learned from the user's texts
            self._write_header(partial, {name: _choose_type(self._type(name)) for name in changed}, mask_token)
            with partial.open("ab") as file:
                for name, tensor in self._tensors.items():
                    file.write(b"\0" * (-file.tell() % _ALIGNMENT))
                    data = tensor.data
                    if name in changed:
                        rows = np.array(changed[name])
                        data = quantize_rows(rows.reshape(-1, rows.shape[-1]), _choose_type(self._type(name)))
                    file.write(np.ascontiguousarray(data).data)
                file.write(b"\0" * (-file.tell() % _ALIGNMENT))

    def _type(self, name: str) -> GgmlType:
        return GGML_TYPES[self._tensors[name].tensor_type]

    def _read(self, name: str) -> npt.NDArray[np.float32]:
        tensor = self._tensors[name]
        return gguf.quants.dequantize(tensor.data, tensor.tensor_type)

    def _find_change(self, name: str, weights: Mapping[str, Any]) -> Any:
        """The new weights of a tensor; None where they are those of the file."""
        if name == ROPE_FACTORS:
            return None
        found = weights[to_folder_name(name)]
        return None if np.array_equal(self._read(name), np.array(found)) else found

    def _write_header(self, path: Path, changed: Mapping[str, GgmlType], mask_token: int | None) -> None:
        """Write all that precedes the data; `changed` are types by name, of tensors whose data changed."""
        writer = gguf.GGUFWriter(path, self._header.architecture)
        left_out = {"general.architecture", "general.alignment"}
        if mask_token is not None:
            writer.add_mask_token_id(mask_token)
            left_out.add(_MASK_TOKEN)
        for key in self._header.metadata:
            if key not in left_out:
                _copy_field(writer, self._reader.fields[key])
        for info in self._header.tensors:
            kind = changed.get(info.name, info.type)
            shape = (*reversed(info.shape[1:]), kind.nbytes(info.shape[0]))
            size = int(np.prod(shape))
            number = gguf.GGMLQuantizationType(GGML_IDS[kind.name])
            writer.add_tensor_info(info.name, shape, np.dtype(np.uint8), size, raw_dtype=number)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()


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


def _choose_type(kind: GgmlType) -> GgmlType:
    return _Q8_0 if kind.name.startswith(_COARSE) else kind


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
