"""GGUF files for the tests: the trained pair where it is, else small ones written by the gguf package."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np

REPOSITORY = Path(__file__).parents[2]
TOKENS = tuple(f"token{number}" for number in range(300))


def model_file(folder: Path, name: str = "draft") -> Path:
    """`name`/model-f16.gguf of EDGESPEC_TEST_MODELS (default: ../shared/models), else a small file in `folder`."""
    stated = os.environ.get("EDGESPEC_TEST_MODELS")
    models = Path(stated) if stated else REPOSITORY.parent / "shared" / "models"
    real = models / name / "model-f16.gguf"
    return real if real.is_file() else write_gguf(folder / f"{name}.gguf")


def write_gguf(
    path: Path,
    *,
    tokens: Sequence[str] = TOKENS,
    types: Sequence[int] | None = None,
    blocks: int = 2,
    kv_heads: int | Sequence[int] = 1,
    pad_bytes: int = 0,
    bos: int | None = 0,
    eos: int | None = 1,
    mask: int | None = None,
    add_bos: bool | None = True,
    model: str = "gpt2",
) -> Path:
    """A valid llama-like file of 2 heads and width 128; `pad_bytes` adds a tensor of about that many random bytes."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(blocks)
    writer.add_context_length(2048)
    writer.add_embedding_length(128)
    writer.add_feed_forward_length(384)
    writer.add_head_count(2)
    writer.add_head_count_kv(kv_heads)
    writer.add_tokenizer_model(model)
    writer.add_token_list(list(tokens))
    writer.add_token_types(list(types) if types else [1] * len(tokens))
    if bos is not None:
        writer.add_bos_token_id(bos)
    if eos is not None:
        writer.add_eos_token_id(eos)
    if mask is not None:
        writer.add_mask_token_id(mask)
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 128), dtype=np.float16))
    writer.add_tensor("output_norm.weight", np.ones(128, dtype=np.float32))
    if pad_bytes:
        random = np.random.default_rng(len(tokens) + pad_bytes)
        writer.add_tensor("blk.0.ffn_up.weight", random.random(pad_bytes // 4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
