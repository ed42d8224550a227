"""Tensors of heads: one set of names for EAGLE-3's three dialects, and the ids of a reduced vocabulary."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import numpy as np

from edgespec.errors import InvalidModelFile

HEAD_HINT = "Download the head again, or use --draft ngram."

# Neutral name -> name in a safetensors file after the layer's prefix, and in a GGUF file after blk.0.
_LAYER = {
    "embedding_norm": ("input_layernorm", "attn_norm"),
    "feature_norm": ("hidden_norm", "attn_norm_2"),
    "q": ("self_attn.q_proj", "attn_q"),
    "k": ("self_attn.k_proj", "attn_k"),
    "v": ("self_attn.v_proj", "attn_v"),
    "o": ("self_attn.o_proj", "attn_output"),
    "ffn_norm": ("post_attention_layernorm", "ffn_norm"),
    "gate": ("mlp.gate_proj", "ffn_gate"),
    "up": ("mlp.up_proj", "ffn_up"),
    "down": ("mlp.down_proj", "ffn_down"),
}
_OUTSIDE = {"fc": ("fc.weight", "fc.weight"), "output_norm": ("norm.weight", "output_norm.weight")}
_OPTIONAL = {
    "output": ("lm_head.weight", "output.weight"),
    "embedding": ("embed_tokens.weight", "token_embd.weight"),
    "d2t": ("d2t", "d2t"),
    "input_norm": ("input_norm.weight", "enc.output_norm.weight"),
    "fc_norm.0": ("fc_norm.0.weight", ""),
    "fc_norm.1": ("fc_norm.1.weight", ""),
    "fc_norm.2": ("fc_norm.2.weight", ""),
}
_PREFIXES = ("midlayer.", "layers.0.", "blk.0.")  # SafeAI; speculators; GGUF


def eagle3_names(names: Iterable[str]) -> dict[str, str]:
    """Neutral name -> the file's own name, of an EAGLE-3 head with tensors `names`.

    Always there: fc, embedding_norm, feature_norm, q, k, v, o, ffn_norm, gate, up, down, output_norm. Where the file
    has them: output, embedding (else the target's), d2t, input_norm (of the concatenated features), fc_norm.0 to
    fc_norm.2 (of each). A prefix `model.` is let pass. Raises InvalidModelFile where a tensor is missing or the head
    has several layers.
    """
    own = {name.removeprefix("model."): name for name in names}
    prefix = next((each for each in _PREFIXES if any(name.startswith(each) for name in own)), _PREFIXES[0])
    dialect = int(prefix == "blk.0.")
    further = prefix.replace("0", "1")
    if further != prefix and any(name.startswith(further) for name in own):
        raise InvalidModelFile("The EAGLE-3 head has more than one layer; heads of one are read.", hint=HEAD_HINT)
    wanted = {neutral: f"{prefix}{both[dialect]}.weight" for neutral, both in _LAYER.items()}
    wanted |= {neutral: both[dialect] for neutral, both in _OUTSIDE.items()}
    if missing := [name for name in wanted.values() if name not in own]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise InvalidModelFile(f"The EAGLE-3 head lacks the tensor {missing[0]}{more}.", hint=HEAD_HINT)
    wanted |= {neutral: both[dialect] for neutral, both in _OPTIONAL.items() if both[dialect] in own}
    return {neutral: own[name] for neutral, name in wanted.items()}


def read_draft_ids(d2t: np.ndarray, vocab_size: int) -> tuple[np.ndarray, Literal["absolute", "offsets"]]:
    """The target's id of every draft id, int32 [draft vocabulary], and what `d2t` holds.

    Offsets (safetensors) are what is added to the draft id, absolute ids (GGUF) are the target's. Either way the
    target's ids ascend and are below `vocab_size`, in tokens. Where both readings fit, `d2t` itself ascends, which
    offsets do only where no two neighbours of the vocabulary are kept: it is read as absolute. Raises InvalidModelFile
    where neither fits.
    """
    if d2t.ndim == 1 and len(d2t) and d2t.dtype.kind in "iu" and len(d2t) <= vocab_size:
        values = d2t.astype(np.int64)
        if _ascends(values, vocab_size):
            return values.astype(np.int32), "absolute"
        if values.min() >= 0 and values.max() < vocab_size and _ascends(shifted := values + _count(values), vocab_size):
            return shifted.astype(np.int32), "offsets"
    raise InvalidModelFile(
        f"The head's table of draft tokens (d2t, {len(d2t) if d2t.ndim else 0:,} entries) does not name tokens of a "
        f"vocabulary of {vocab_size:,}.",
        hint="The head is for another model. Use --draft ngram, or another head.",
    )


def _count(values: np.ndarray) -> np.ndarray:
    return np.arange(len(values), dtype=np.int64)


def _ascends(ids: np.ndarray, vocab_size: int) -> bool:
    return bool(ids[0] >= 0 and ids[-1] < vocab_size and (np.diff(ids) > 0).all())
