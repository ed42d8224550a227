"""Tensors of heads: one set of names for the dialects of each kind, and the ids of a reduced vocabulary."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
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
_OWN = {"output": "lm_head.weight", "embedding": "embed_tokens.weight"}  # where a head does not use the target's
_EXTRAS = {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
_DFLASH_EXTRAS = {
    "d2t": "d2t",
    "markov_1": "markov_head.markov_w1.weight",
    "markov_2": "markov_head.markov_w2.weight",
    "confidence": "confidence_head.proj.weight",
}
_PART = re.compile(r"\.(?:weight|bias|scales|biases)$")
_MIXTURE = {  # of an MTP layer; the experts' matrices lie in one tensor
    "router": "mlp.gate",
    **{neutral: f"mlp.switch_mlp.{neutral}_proj" for neutral in ("gate", "up", "down")},
}
_SHARED_EXPERT = {
    "shared_router": "mlp.shared_expert_gate",
    **{f"shared_{neutral}": f"mlp.shared_expert.{neutral}_proj" for neutral in ("gate", "up", "down")},
}
_UNSUPPORTED = {
    "mlp.shared_experts.": "a mixture of experts that is not Qwen's",
    "mlp.gate.e_score_correction_bias": "a mixture of experts that is not Qwen's",
    "self_attn.kv_a_proj_with_mqa.": "latent attention",
}
_QWEN_MTP = re.compile(r"(?P<prefix>.*?)pre_fc_norm_hidden\.weight$")
_DEEPSEEK_MTP = re.compile(r"(?P<prefix>.*?)eh_proj\.weight$")
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
    extra = {neutral: both[dialect] for neutral, both in _OPTIONAL.items()}
    if not dialect:
        extra |= {neutral: f"{prefix}{name}.weight" for neutral, name in _EXTRAS.items()}
    return _find(own, "EAGLE-3", wanted, extra)


def eagle_names(names: Iterable[str]) -> dict[str, str]:
    """Neutral name -> the file's own name, of an EAGLE-1 or EAGLE-2 head in safetensors or a pickle.

    Always there: fc, and of layer i `i.q`, `i.k`, `i.v`, `i.o`, `i.ffn_norm`, `i.gate`, `i.up`, `i.down`; of all but
    the first layer `i.attention_norm`. Where the file has them: `i.q_norm`, `i.k_norm`, embedding, output (else the
    target's). A prefix `model.` is let pass. Raises InvalidModelFile where a tensor is missing.
    """
    own = {name.removeprefix("model."): name for name in names}
    wanted, extra = _add_layers(own, {"fc": "fc.weight"}, _OWN, normed_from=1)
    return _find(own, "EAGLE", wanted, extra)


def dflash_names(names: Iterable[str]) -> dict[str, str]:
    """Neutral name -> the file's own name, of a DFlash or DSpark head in safetensors.

    Always there: fc, feature_norm, output_norm, and of layer i `i.attention_norm`, `i.q`, `i.k`, `i.v`, `i.o`,
    `i.ffn_norm`, `i.gate`, `i.up`, `i.down`. Where the file has them: `i.q_norm`, `i.k_norm`, embedding, output (else
    the target's), d2t, and of DSpark markov_1, markov_2, confidence. A prefix `model.` is let pass. Raises
    InvalidModelFile where a tensor is missing, or where there are others: those of DFlash2, or of layers that are not
    llama's.
    """
    own = {name.removeprefix("model."): name for name in names}
    wanted = {"fc": "fc.weight", "feature_norm": "hidden_norm.weight", "output_norm": "norm.weight"}
    wanted, extra = _add_layers(own, wanted, {**_OWN, **_DFLASH_EXTRAS}, normed_from=0)
    known = {_PART.sub("", name) for name in (*wanted.values(), *extra.values(), "t2d")}
    if unknown := sorted(name for name in own if _PART.sub("", name) not in known):
        raise InvalidModelFile(f"The head has the tensor {unknown[0]}, which is not run.", hint=HEAD_HINT)
    return _find(own, "DFlash", wanted, extra)


def mtp_names(names: Iterable[str]) -> dict[str, str]:
    """Neutral name -> the file's own name, of an MTP layer in safetensors, by Qwen's or DeepSeek's names.

    Always there: fc, embedding_norm, feature_norm, attention_norm, q, k, v, o, ffn_norm, gate, up, down, output_norm.
    Where the file has them: q_norm, k_norm, embedding, output (else the target's). Of a mixture of experts gate, up and
    down are those of all experts; there are router and, for an expert that sees all tokens, shared_router, shared_gate,
    shared_up, shared_down. The file may hold the target too.
    Raises InvalidModelFile where a tensor is missing, for several layers, and for layers of other kinds.
    """
    own = {name: name for name in names}
    qwen = sorted({found["prefix"] for name in own if (found := _QWEN_MTP.match(name))})
    deepseek = sorted({found["prefix"] for name in own if (found := _DEEPSEEK_MTP.match(name))})
    if len(qwen) + len(deepseek) != 1 or any(name.startswith(f"{qwen[0]}layers.1.") for name in own if qwen):
        raise InvalidModelFile("The file does not have one MTP layer; others are not run.", hint=HEAD_HINT)
    if qwen:
        prefix = f"{(outer := qwen[0])}layers.0."
        outside = ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
        extra = {neutral: f"{outer}{name}" for neutral, name in _OWN.items()}
    else:
        prefix = outer = deepseek[0]
        outside = ("eh_proj", "enorm", "hnorm", "shared_head.norm")
        extra = {"output": f"{outer}shared_head.head.weight", "embedding": f"{outer}embed_tokens.weight"}
    for part, what in _UNSUPPORTED.items():
        if any(name.startswith(f"{prefix}{part}") for name in own):
            raise InvalidModelFile(f"The MTP layer has {what}, which is not run.", hint=HEAD_HINT)
    wanted = dict(zip(("fc", "embedding_norm", "feature_norm", "output_norm"), outside, strict=True))
    wanted = {neutral: f"{outer}{name}.weight" for neutral, name in wanted.items()} | _layer_names(prefix)
    wanted["attention_norm"] = f"{prefix}input_layernorm.weight"
    extra |= {neutral: f"{prefix}{name}.weight" for neutral, name in _EXTRAS.items()}
    if f"{prefix}mlp.gate.weight" in own:
        wanted |= {neutral: f"{prefix}{name}.weight" for neutral, name in _MIXTURE.items()}
        extra |= {neutral: f"{prefix}{name}.weight" for neutral, name in _SHARED_EXPERT.items()}
    return _find(own, "MTP", wanted, extra)


HEAD_NAMES: Mapping[str, Callable[[Iterable[str]], dict[str, str]]] = {
    "eagle3": eagle3_names,
    "eagle": eagle_names,
    "mtp": mtp_names,
    "dflash": dflash_names,
    "dspark": dflash_names,
}
"""The function of each kind from the names of a file's tensors to {neutral name: the file's own}."""


def _layer_names(prefix: str) -> dict[str, str]:
    """The names of a llama layer in safetensors, without the norm before its attention."""
    both = {neutral: each for neutral, each in _LAYER.items() if neutral not in ("embedding_norm", "feature_norm")}
    return {neutral: f"{prefix}{name}.weight" for neutral, (name, _) in both.items()}


def _add_layers(
    own: Mapping[str, str], wanted: Mapping[str, str], extra: Mapping[str, str], normed_from: int
) -> tuple[dict[str, str], dict[str, str]]:
    """`wanted` and `extra` with the names of layers 0, 1, ..., as many as the file has, and one at least.

    Layers from number `normed_from` on have a norm before their attention.
    """
    wanted, extra, layer = dict(wanted), dict(extra), 0
    while layer == 0 or any(name.startswith(f"layers.{layer}.") for name in own):
        prefix = f"layers.{layer}."
        wanted |= {f"{layer}.{neutral}": name for neutral, name in _layer_names(prefix).items()}
        if layer >= normed_from:
            wanted[f"{layer}.attention_norm"] = f"{prefix}input_layernorm.weight"
        extra |= {f"{layer}.{neutral}": f"{prefix}{name}.weight" for neutral, name in _EXTRAS.items()}
        layer += 1
    return wanted, extra


def _find(own: Mapping[str, str], kind: str, wanted: Mapping[str, str], extra: Mapping[str, str]) -> dict[str, str]:
    """The file's own name of all that is `wanted`, and of what it has of `extra`."""
    if missing := [name for name in wanted.values() if name not in own]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise InvalidModelFile(f"The {kind} head lacks the tensor {missing[0]}{more}.", hint=HEAD_HINT)
    found = {**wanted, **{neutral: name for neutral, name in extra.items() if name in own}}
    return {neutral: own[name] for neutral, name in found.items()}


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
        if (
            values.min() >= 0
            and values.max() < vocab_size
            and _ascends(shifted := values + np.arange(len(values)), vocab_size)
        ):
            return shifted.astype(np.int32), "offsets"
    raise InvalidModelFile(
        f"The head's table of draft tokens (d2t, {len(d2t) if d2t.ndim else 0:,} entries) does not name tokens of a "
        f"vocabulary of {vocab_size:,}.",
        hint="The head is for another model. Use --draft ngram, or another head.",
    )


def _ascends(ids: np.ndarray, vocab_size: int) -> bool:
    return bool(ids[0] >= 0 and ids[-1] < vocab_size and (np.diff(ids) > 0).all())


# Tensor names of the llama, qwen2 and qwen3 architectures: GGUF -> Hugging Face.


PARTS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QWEN3_PARTS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}


def to_folder_name(name: str) -> str:
    """'blk.0.attn_q.weight' -> 'model.layers.0.self_attn.q_proj.weight'. Raises KeyError for a name of neither kind."""
    part, _, kind = name.rpartition(".")
    if not part.startswith("blk."):
        return f"{PARTS[part]}.{kind}"
    _, layer, inner = part.split(".", 2)
    return f"model.layers.{layer}.{(PARTS | _QWEN3_PARTS)[inner]}.{kind}"
