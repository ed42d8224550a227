"""DFlash and DSpark heads, which draft a block of tokens in one forward over hidden states of the target.

A block has the root and a mask token for each of the positions after it. Its rows see each other and the target's
states before the root. DSpark adds to the logits of a row a bias that depends on the token before, for which the
graph takes the most probable one of the row before (SpecForge's Markov head).
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from edgespec.backends.attached_draft import Unsupported
from edgespec.backends.head_session import read_block
from edgespec.backends.llamacpp.heads.checks import OpenContext, check_ids, check_key_sizes, require
from edgespec.backends.llamacpp.heads.contexts import BlockContext
from edgespec.backends.llamacpp.model import LlamaModel
from edgespec.formats.gguf import Header
from edgespec.formats.gguf_validate import read_file
from edgespec.formats.heads import HeadSpec


def prepare_dflash(target: LlamaModel, path: Path, spec: HeadSpec) -> OpenContext:
    header = read_file(path)
    _check_dflash_file(header, path, target.tokenizer.vocab_size)
    block = read_block(spec, target.tokenizer.vocab_size)
    is_causal, width = header.metadata.get("dflash.attention.causal") is True, len(spec.layers or ()) * spec.hidden_size
    return partial(BlockContext, width=width, block=block, is_causal=is_causal)


def _check_dflash_file(header: Header, path: Path, vocab_size: int) -> None:
    """Raises InvalidModelFile, Unsupported unless llama.cpp runs the head for a target with `vocab_size` tokens."""
    for name, found in (
        ("DFlash2", header.shape("selector_hidden.weight")),  # which drafts by its selector and not by its logits
        ("DeepSeek V4's DSpark", header.own("hyper_connection_count")),
    ):
        if found:
            raise Unsupported(f"{path.name} is a head of the kind {name}, which is not run.", hint="Use --draft auto.")
    check_key_sizes(header)
    heads = set(header.per_block("attention.head_count") or (0,))
    kv_heads = set(header.per_block("attention.head_count_kv") or heads)
    n, n_kv = max(heads), max(kv_heads)
    is_even = len(heads) == len(kv_heads) == 1 and min(n, n_kv) > 0 and n % n_kv == 0
    require(header, is_even, "its layers differ in their heads, or heads do not share keys evenly")
    _check_rope(header, header.own("attention.key_length") or (header.own("embedding_length") or 0) // n)
    if (d2t := header.tensor("d2t")) is not None:
        output = header.shape("output.weight")
        require(header, output is not None, "it has a reduced vocabulary and no output matrix")
        check_ids(header, path, d2t, (output or (0,))[-1], vocab_size)


def _check_rope(header: Header, width: int) -> None:
    """Raises InvalidModelFile unless the rotation fits keys of `width` numbers."""
    rotated = header.own("rope.dimension_count")
    rotated = width if rotated is None else rotated
    require(header, 0 <= rotated <= width and rotated % 2 == 0, f"it rotates {rotated} of {width} numbers of a key")
    sections = header.metadata.get("dflash.rope.dimension_sections")
    if isinstance(sections, int | np.ndarray):  # one number stands for all of them
        numbers = [sections] * 4 if isinstance(sections, int) else [int(number) for number in sections]
        is_sound = not any(numbers) or (numbers[0] > 0 and min(numbers) >= 0 and sum(numbers) <= width)
        require(header, is_sound, f"its rotary embedding has the sections {numbers} of {width} numbers")
