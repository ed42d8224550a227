"""A draft model that is trained: opened from its file, changed in single precision, saved in the file's own format."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from edgespec.backends.mlx.library import load_mlx, map_errors
from edgespec.errors import BackendError, BackendUnavailable, CacheError, DraftRefused, InvalidModelFile, reason_of
from edgespec.formats.head_file import read_head

LORA_SCALE = 20.0  # by which the product of the two small matrices is multiplied; mlx-lm's default
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Draft(Protocol):
    """A draft model in a file or folder; `network` is mlx-lm's."""

    network: Any

    def save(self, weights: Mapping[str, Any], path: Path, mask_token: int | None) -> None:
        """Write the base with these weights, by name, at once or not at all; see Student.save. Raises OSError."""
        ...


class Student:
    """A draft model as a trainable network. The thread that opened it uses it.

    network  mlx-lm's module in single precision: tokens int32 [B, T] to logits [B, T, V]
    """

    def __init__(self, draft: Draft) -> None:
        self.network = draft.network
        self._draft = draft

    @classmethod
    def open(cls, path: Path) -> Student:
        """Open a GGUF file of a llama, qwen2 or qwen3, or a folder that mlx-lm opens; nothing is trainable yet.

        Raises InvalidModelFile, DraftRefused for a head and a mixture, BackendUnavailable without MLX, BackendError,
        CacheError.
        """
        if not path.exists():
            raise InvalidModelFile(f"there is no model at {path}.", hint="Check the path of the draft model.")
        head = read_head(path)
        if head is not None and not head.in_target:
            raise DraftRefused(
                f"{path.name} is a head ({head.kind}), not a draft model.", hint="Name the draft model of the target."
            )
        _require_mlx()
        from edgespec.adapt.folder_draft import FolderDraft
        from edgespec.adapt.gguf_draft import GgufDraft

        with map_errors():
            draft = FolderDraft(path) if path.is_dir() else GgufDraft(path)
            draft.network.freeze()
        return cls(draft)

    def train_lora(self, rank: int) -> None:
        """Make two matrices of `rank` trainable beside each linear layer of the blocks, and nothing else.

        They are drawn by mx.random, and change nothing until they are trained. Called once, on a student that trains
        nothing yet.
        """
        from mlx_lm.tuner.utils import linear_to_lora_layers

        config = {"rank": rank, "scale": LORA_SCALE, "dropout": 0.0}
        linear_to_lora_layers(self.network, len(self.network.layers), config)
        self.network.train()

    def train_all(self) -> None:
        """Make all weights trainable."""
        self.network.unfreeze()
        self.network.train()

    @property
    def vocab_size(self) -> int:
        """V"""
        return int(self.network.args.vocab_size)

    def save(self, path: Path, mask_token: int | None = None) -> None:
        """Write the trained model in the format that it was opened from, at once or not at all, for its owner only.

        A file replaces one that exists; a folder must not exist. The network can be trained further. With `mask_token`
        the metadata name this token as that of a PARD model.
        Raises BackendError for weights that are not finite, CacheError where the path cannot be written.
        """
        with map_errors():
            weights = _merge(self.network)
            _check_finite(weights)
        try:
            self._draft.save(weights, path, mask_token)
        except OSError as error:
            reason = "the disk is full" if error.errno in _FULL else reason_of(error)
            raise CacheError(
                f"{path} cannot be written: {reason}.", hint="Free some disk space, or choose another folder."
            ) from error


def _require_mlx() -> None:
    try:
        load_mlx()
    except BackendUnavailable as error:
        raise BackendUnavailable(
            f"a draft is trained by MLX, and {error.message}", hint="Install it: pip install 'edgespec[adapt]'."
        ) from error


def _merge(network: Any) -> dict[str, Any]:
    """Weights by name, as they were before LoRA was added, with its products in them."""
    from mlx.utils import tree_flatten
    from mlx_lm.tuner.lora import LoRALinear

    layers = {name: module for name, module in network.named_modules() if isinstance(module, LoRALinear)}
    weights = {}
    for name, array in tree_flatten(network.parameters()):
        part, _, kind = name.rpartition(".")
        outer = part.removesuffix(".linear")
        if part not in layers:  # where they are the small matrices
            weights[f"{outer if outer in layers else part}.{kind}"] = array
    for name, layer in layers.items():
        base = weights[f"{name}.weight"]  # += would change the network's own array
        weights[f"{name}.weight"] = base + layer.scale * (layer.lora_a @ layer.lora_b).T
    return weights


def _check_finite(weights: Mapping[str, Any]) -> None:
    mx = load_mlx()
    if not all(mx.isfinite(array).all().item() for array in weights.values()):
        raise BackendError(
            "the trained weights are not finite numbers, so nothing was saved.", hint="Train with a lower rate."
        )
