"""A trained head in a folder as a trainable network, and the folder of the head once it was trained further."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from edgespec.backends.mlx.eagle import EagleNetwork
from edgespec.backends.mlx.eagle3 import Eagle3Network
from edgespec.backends.mlx.head_layer import read_layer_shape
from edgespec.backends.mlx.head_weights import HeadWeights, read_arrays
from edgespec.backends.mlx.library import map_errors
from edgespec.backends.mlx.mtp import MtpNetwork, find_shifts
from edgespec.backends.mlx.pair_session import PairNetwork
from edgespec.backends.mlx.target_parts import TargetParts, read_target
from edgespec.errors import BackendError, CacheError, DraftRefused, reason_of
from edgespec.files import new_folder
from edgespec.formats.head_tensors import eagle3_names, eagle_names, mtp_names
from edgespec.formats.heads import HeadKind, HeadSpec, usual_layers
from edgespec.formats.mlx_folder import read_json

_NAMES: Mapping[HeadKind, Callable[[Any], dict[str, str]]] = {
    "mtp": mtp_names,
    "eagle": eagle_names,
    "eagle3": eagle3_names,
}
_SHARED = ("embedding", "output", "d2t")  # large matrices and tables, which are not trained

Maker = Callable[[Mapping[str, Any]], PairNetwork]
"""Builds a head from tensors by the names of its file."""


class _LoadedWeights(HeadWeights):
    """Arrays that may be differentiated."""

    def load(self) -> None:
        return


class HeadNetwork(nn.Module):  # type: ignore[misc]
    """The tensors of a head as parameters."""

    def __init__(self, trained: Mapping[str, Any], fixed: Mapping[str, Any], make: Maker) -> None:
        """Both by the names of the file."""
        super().__init__()
        self._names = list(trained)
        self._fixed = dict(fixed)
        self._make = make
        self.tensors = list(trained.values())

    @property
    def arrays(self) -> dict[str, Any]:
        """All tensors of the head by the names of the file."""
        return {**self._fixed, **dict(zip(self._names, self.tensors, strict=True))}

    def build(self) -> PairNetwork:
        """The head with the present tensors."""
        return self._make(self.arrays)


class HeadStudent:
    """An MTP, EAGLE or EAGLE-3 head beside its target. All is trained but embeddings and an output matrix of its own.

    network  its tensors in single precision
    layers   of the target, whose hidden states it reads; as formats.heads.HeadSpec
    """

    def __init__(self, folder: Path, spec: HeadSpec, target: Any, n_layers: int) -> None:
        """`target` is mlx-lm's model with `n_layers`.

        Raises DraftRefused for heads that are not trained here, Unsupported for a head of another target;
        InvalidModelFile, CacheError, BackendError.
        """
        if spec.kind not in _NAMES or not folder.is_dir():
            raise DraftRefused(
                f"{folder.name} cannot be trained: it is not a folder with an MTP, EAGLE or EAGLE-3 head.",
                hint="Use the folder with config.json and safetensors that the head was released as.",
            )
        spec = replace(spec, layers=usual_layers(n_layers)) if spec.layers is None else spec
        arrays = read_arrays(folder)
        names = _NAMES[spec.kind](arrays)
        if "router" in names:
            raise DraftRefused(
                f"{folder.name} is a mixture of experts, which cannot be trained here.", hint="Use a dense head."
            )
        self.layers = spec.layers or ()
        self._folder = folder
        with map_errors():
            make = _choose_maker(folder, spec, names, arrays, read_target(target))
            fixed = {key: arrays[key] for name in _SHARED if name in names for key in _find_parts(arrays, names[name])}
            own = {key: arrays[key] for name in names.values() for key in _find_parts(arrays, name) if key not in fixed}
            self._others = {} if spec.in_target else {key: arrays[key] for key in arrays if key not in own}
            if any(name.endswith(".scales") for name in own):
                raise DraftRefused(
                    f"{folder.name} is quantized, and cannot be trained.", hint="Use its release in half precision."
                )
            self._dtypes = {name: each.dtype for name, each in own.items()}
            self.network = HeadNetwork({name: each.astype(mx.float32) for name, each in own.items()}, fixed, make)
            self.network.build()  # checks the shapes
            mx.eval(self.network.parameters())

    def save(self, path: Path) -> None:
        """Write a folder of the head alone, with the number types of the base.

        At once or not at all, for its owner only; `path` must not exist. Raises BackendError for weights that are not
        finite, CacheError.
        """
        with map_errors():
            arrays = {**self._others, **self.network.arrays}
            if not all(mx.isfinite(each).all().item() for each in self.network.tensors):
                raise BackendError(
                    "the trained weights are not finite numbers, so nothing was saved.", hint="Train with a lower rate."
                )
            arrays = {name: each.astype(self._dtypes.get(name, each.dtype)) for name, each in arrays.items()}
            mx.eval(arrays)
        config = read_json(self._folder / "config.json")
        try:
            with new_folder(path) as partial:
                (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
                _write(partial / "model.safetensors", arrays)
                for file in partial.iterdir():
                    file.chmod(0o600)
        except OSError as error:
            raise CacheError(
                f"{path} cannot be written: {reason_of(error)}.", hint="Free some disk space, or choose another folder."
            ) from error


def _choose_maker(
    folder: Path, spec: HeadSpec, names: Mapping[str, str], arrays: Mapping[str, Any], target: TargetParts
) -> Maker:
    """Raises InvalidModelFile, CacheError, BackendError."""
    shape = read_layer_shape(folder)
    if spec.kind == "eagle":
        return lambda own: EagleNetwork(spec, shape, _LoadedWeights(own, names), target)
    if spec.kind == "eagle3":
        return lambda own: Eagle3Network(spec, shape, _LoadedWeights(own, names), target)
    shifts = find_shifts(HeadWeights(arrays, names), names)
    return lambda own: MtpNetwork(spec, shape, _LoadedWeights(own, names), shifts, target)


def _find_parts(arrays: Mapping[str, Any], name: str) -> list[str]:
    """The names of a matrix, of its bias, and of what it is quantized with."""
    stem = name.removesuffix(".weight")
    return [key for key in (name, *(f"{stem}.{part}" for part in ("bias", "scales", "biases"))) if key in arrays]


def _write(file: Path, arrays: dict[str, Any]) -> None:
    """Raises OSError."""
    try:
        mx.save_safetensors(str(file), arrays, {"format": "mlx"})
    except RuntimeError as error:  # all that is left to fail is the disk; MLX does not tell why
        raise OSError(errno.ENOSPC, reason_of(error)) from error
