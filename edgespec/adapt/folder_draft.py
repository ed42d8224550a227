"""A draft model in a folder with config.json and safetensors as a network, and its folder once it is trained."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.utils import dequantize_model, load_model

from edgespec.backends.mlx.library import map_errors
from edgespec.backends.mlx.model import load_error
from edgespec.errors import DraftRefused, reason_of
from edgespec.files import new_folder
from edgespec.formats.mlx_folder import read_folder, read_json

_COPIED = ("*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt")
_INDEX = "model.safetensors.index.json"  # of several files; one is written


class FolderDraft:
    """`network` has the weights of the folder in single precision, quantized ones too."""

    def __init__(self, path: Path) -> None:
        """Raises InvalidModelFile for a folder that mlx-lm cannot open, DraftRefused, CacheError."""
        read_folder(path)
        self._path = path
        self._arrays: dict[str, Any] = {}  # by the names of the files; read when they are used
        try:
            self.network = load_model(path, lazy=True, strict=True, trust_remote_code=False)[0]
            for file in sorted(path.glob("model*.safetensors")):
                arrays, self._metadata = mx.load(str(file), return_metadata=True)
                self._arrays |= arrays
        except (Exception, SystemExit) as error:  # a class of mlx-lm exits where a package is missing
            raise load_error(path, error) from error
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

    def save(self, weights: Mapping[str, Any], path: Path, mask_token: int | None) -> None:
        """Write a folder with these weights, by name, and the config and tokenizer of the base.

        Tensors have the types of the base; matrices that were quantized are quantized again, unless they did not
        change. Raises OSError, also where `path` is a folder with files.
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
            if mask_token is not None:
                config = {**read_json(self._path / "config.json"), "pard_token": mask_token}
                (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            _write(partial / "model.safetensors", arrays, self._metadata)
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
        """The tensors of a quantized matrix: those of the base where it did not change."""
        names = [f"{part}.{kind}" for kind in ("weight", "scales", "biases")]
        base = [self._arrays[name] for name in names if name in self._arrays]
        group, bits, mode = self._quantized[part]
        wide = [each.astype(mx.float32) if mx.issubdtype(each.dtype, mx.floating) else each for each in base]
        before = mx.dequantize(*wide, group_size=group, bits=bits, mode=mode).astype(mx.float32)
        if not mx.array_equal(before, weight):
            dtype = base[1].dtype if mx.issubdtype(base[1].dtype, mx.floating) else weight.dtype
            base = mx.quantize(weight.astype(dtype), group_size=group, bits=bits, mode=mode)
        return dict(zip(names, base, strict=False))


def _write(file: Path, arrays: dict[str, Any], metadata: dict[str, str]) -> None:
    """Raises OSError, BackendError."""
    with map_errors():
        mx.eval(arrays)
    try:
        mx.save_safetensors(str(file), arrays, metadata)
    except RuntimeError as error:  # all that is left to fail is the disk; MLX does not tell why
        raise OSError(errno.ENOSPC, reason_of(error)) from error
