"""Checks of DFlash and DSpark files on which llama.cpp would abort the process, later than it loads them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from edgespec.backends.attached_draft import Unsupported
from edgespec.backends.llamacpp.draft_ids import check_ids
from edgespec.formats.gguf import Header


def check_file(header: Header, path: Path, vocab_size: int) -> None:
    """That llama.cpp runs the head for a target with `vocab_size` tokens. Raises InvalidModelFile, Unsupported."""
    shapes = {tensor.name: tensor.shape for tensor in header.tensors}
    for name, found in (
        ("DFlash2", "selector_hidden.weight" in shapes),  # which drafts by its selector and not by its logits
        ("DeepSeek V4's DSpark", bool(header.own("hyper_connection_count"))),
    ):
        if found:
            raise Unsupported(f"{path.name} is a head of the kind {name}, which is not run.", hint="Use --draft auto.")
    _check_attention(header)
    _check_rope(header)
    if (d2t := next((tensor for tensor in header.tensors if tensor.name == "d2t"), None)) is not None:
        if "output.weight" not in shapes:
            raise header.invalid("it has a reduced vocabulary and no output matrix")
        check_ids(header, path, d2t, shapes["output.weight"][-1], vocab_size)


def _check_attention(header: Header) -> None:
    if header.own("attention.key_length") != header.own("attention.value_length"):
        raise header.invalid("its keys and values differ in size")
    heads, kv_heads = header.per_block("attention.head_count"), header.per_block("attention.head_count_kv")
    n, n_kv = set(heads or (0,)), set(kv_heads or heads or (0,))
    if len(n) > 1 or len(n_kv) > 1 or min(*n, *n_kv) < 1 or max(n) % max(n_kv):
        raise header.invalid("its layers differ in their heads, or heads do not share keys evenly")


def _check_rope(header: Header) -> None:
    heads = header.per_block("attention.head_count") or (1,)
    width = header.own("attention.key_length") or (header.own("embedding_length") or 0) // heads[0]
    rotated = header.own("rope.dimension_count")
    if not 0 <= (rotated := width if rotated is None else rotated) <= width or rotated % 2:
        raise header.invalid(f"it rotates {rotated} of {width} numbers of a key")
    sections = header.metadata.get("dflash.rope.dimension_sections")
    if isinstance(sections, int | np.ndarray):  # one number stands for all of them
        numbers = [sections] * 4 if isinstance(sections, int) else [int(number) for number in sections]
        if any(numbers) and (numbers[0] <= 0 or min(numbers) < 0 or sum(numbers) > width):
            raise header.invalid(f"its rotary embedding has the sections {numbers} of {width} numbers")
