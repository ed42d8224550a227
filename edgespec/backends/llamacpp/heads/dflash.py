"""DFlash, DFlash2 and DSpark heads, which draft a block of tokens in one forward over hidden states of the target.

A block has the root and a mask token for each of the positions after it. Its rows see each other and the target's
states before the root. DSpark adds to the logits of a row a bias that depends on the token before, for which the
graph takes the most probable one of the row before (SpecForge's Markov head). DFlash2 mixes neighbouring rows before
and after attention and feed-forward, and chooses by a selector among the best tokens of each row.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.backends.attached_draft import Unsupported
from edgespec.backends.head_session import read_block
from edgespec.backends.llamacpp.heads.checks import OpenContext, check_ids, check_key_sizes, require
from edgespec.backends.llamacpp.heads.contexts import BlockContext, SelectorContext
from edgespec.backends.llamacpp.model import LlamaModel
from edgespec.formats.gguf import Header
from edgespec.formats.gguf_validate import read_file
from edgespec.formats.heads import HeadSpec

_SELECTOR = "selector_hidden.weight"


def prepare_dflash(target: LlamaModel, path: Path, spec: HeadSpec) -> OpenContext:
    header = read_file(path)
    _check_dflash_file(header, path, target.tokenizer.vocab_size)
    block = read_block(spec, target.tokenizer.vocab_size)
    is_causal, width = header.metadata.get("dflash.attention.causal") is True, len(spec.layers or ()) * spec.hidden_size
    settings: dict[str, Any] = {"width": width, "block": block, "is_causal": is_causal}
    if header.shape(_SELECTOR) is None:
        return partial(BlockContext, **settings)
    return partial(SelectorContext, candidates=_read_candidates(header, target.tokenizer.vocab_size), **settings)


def _check_dflash_file(header: Header, path: Path, vocab_size: int) -> None:
    """Raises InvalidModelFile, Unsupported unless llama.cpp runs the head for a target with `vocab_size` tokens."""
    if header.own("hyper_connection_count"):
        kind = "DeepSeek V4's DSpark"
        raise Unsupported(f"{path.name} is a head of the kind {kind}, which is not run.", hint="Use --draft auto.")
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


def _read_candidates(header: Header, vocab_size: int) -> int:
    """How many candidates a row of DFlash2 has. Raises InvalidModelFile if llama.cpp cannot choose among as many."""
    found = header.own("selector_top_k") or 0
    size = header.own("embedding_length") or 0
    is_sound = 0 < found <= vocab_size and found * (found + 1) <= size
    require(header, is_sound, f"its rows have {found} candidates, and its states {size} numbers for their scores")
    bases = [each for each in header.tensors if each.name.endswith("_conv_base")]
    require(header, all(each.type.name == "F32" for each in bases), "its convolutions are not in F32")
    return found


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
