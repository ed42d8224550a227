"""Small draft models in every format that is trained, by name, and what the runtimes say of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optimizers
import numpy as np
import numpy.typing as npt

from edgespec.backends.llamacpp.model import load as load_llamacpp
from edgespec.backends.llamacpp.quantize import quantize
from edgespec.backends.mlx.model import load as load_mlx
from edgespec.backends.options import LoadOptions
from edgespec.train.student import Student
from tests.contract.runtimes import prefill
from tests.gguf_models import DRAFT, find_trained, llama, llama3, qwen
from tests.mlx_models import CONFIGS, DENSE, make_folder

TEXT = [int(token) for token in np.random.default_rng(0).integers(4, 4096, 24)]


def lower(path: Path, ftype: str) -> None:
    """A llama in rows of 256, as K-quants need them, quantized by llama.cpp."""
    source = path.with_name("wide.gguf")
    llama(source, width=256)
    quantize(source, path, ftype)


def ternary(path: Path) -> None:
    """A llama whose first attention output has a type that is ruined by quantizing."""
    source = path.with_name("wide.gguf")
    llama(source, width=256)
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, "llama")
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            writer.add_key_value(name, field.contents(), field.types[0], field.types[-1])
    for tensor in reader.tensors:
        kind, data = tensor.tensor_type, tensor.data
        if tensor.name == "blk.0.attn_output.weight":
            kind = gguf.GGMLQuantizationType.TQ2_0
            data = gguf.quants.quantize(data, kind)
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()


def folder(path: Path, **changes: Any) -> None:
    make_folder(path, {**DENSE, **changes})


# Makers by name, with the largest difference from the runtime's logits, whose standard deviation is about 3. llama.cpp
# rounds activations: to 16 bits before matrices of 16 bits, to 8 bits before quantized ones.
MAKERS: dict[str, tuple[Callable[[Path], object], float]] = {
    "llama.gguf": (llama, 0.02),
    "llama3.gguf": (llama3, 0.02),
    "qwen2.gguf": (partial(qwen, architecture="qwen2"), 0.02),
    "qwen3.gguf": (partial(qwen, architecture="qwen3"), 0.02),
    "q4_0.gguf": (partial(lower, ftype="Q4_0"), 0.5),
    "q4_k.gguf": (partial(lower, ftype="Q4_K_M"), 0.5),
    "llama-folder": (folder, 0.001),
    "tied-folder": (partial(folder, tie_word_embeddings=True), 0.001),
    "qwen3-folder": (partial(folder, model_type="qwen3", rope_theta=1e4), 0.001),
    "gemma3-folder": (partial(make_folder, config=CONFIGS["sliding-window"]), 0.001),
    "4-bit-folder": (partial(make_folder, config=DENSE, bits=4), 0.001),
}
F16 = find_trained("draft")  # the packaged one again where there is no other
TRAINED = {"packaged": (DRAFT, 0.5), "f16": (F16, 0.5 if F16 == DRAFT else 0.02)}
NAMES = (*TRAINED, *MAKERS)
LOW_BIT = ("q4_0.gguf", "q4_k.gguf", "4-bit-folder")  # rounding of the weights themselves is seen in the logits


def make_draft(name: str, parent: Path) -> tuple[Path, float]:
    """The path of a draft, made in `parent` if it is not there, and its tolerance."""
    if name in TRAINED:
        return TRAINED[name]
    make, tolerance = MAKERS[name]
    path = parent / name
    if not path.exists():
        make(path)
    return path, tolerance


def read_runtime(path: Path) -> npt.NDArray[np.float32]:
    """[V] logits after TEXT: llama.cpp's of a file, mlx-lm's of a folder."""
    model = (load_mlx if path.is_dir() else load_llamacpp)(path, LoadOptions(context_size=256))
    logits = prefill(model.open_session(), TEXT).copy()
    model.close()
    return logits


def read_network(student: Student) -> npt.NDArray[np.float32]:
    """[V] logits after TEXT."""
    return np.array(student.network(mx.array([TEXT])))[0, -1]


def train(student: Student, steps: int = 4) -> list[float]:
    """Losses of a few steps towards a text of one token."""
    tokens, wanted = mx.array([TEXT]), mx.full((1, len(TEXT)), 7)
    gradient = nn.value_and_grad(
        student.network, lambda: nn.losses.cross_entropy(student.network(tokens), wanted, reduction="mean")
    )
    optimizer = optimizers.Adam(learning_rate=2e-3)
    losses = []
    for _ in range(steps):
        loss, gradients = gradient()
        optimizer.update(student.network, gradients)
        mx.eval(student.network.parameters())
        losses.append(float(loss.item()))
    return losses
