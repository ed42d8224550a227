"""Neutral names for the tensors of heads in all dialects, and the ids of a reduced vocabulary.

The function of a kind takes the names of a file's tensors, with or without the prefix `model.`, and returns the file's
own name of each neutral one. A head has all tensors of _LAYER, and may have those in the tables of extras. The neutral
names of EAGLE and DFlash heads, which may have several layers, begin with the layer's number, such as `0.q`. Without
`embedding` and `output` a head uses the target's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from edgespec.errors import InvalidModelFile
from edgespec.formats.heads import HEAD_HINT

# Neutral name -> name in a file after the layer's prefix, without .weight
_LAYER = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_LAYER_EXTRAS = {"attention_norm": "input_layernorm", "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
_MIXTURE = {  # of an MTP layer; the experts' matrices lie in one tensor
    "router": "mlp.gate",
    **{neutral: f"mlp.switch_mlp.{neutral}_proj" for neutral in ("gate", "up", "down")},
}
_SHARED_EXPERT = {
    "shared_router": "mlp.shared_expert_gate",
    **{f"shared_{neutral}": f"mlp.shared_expert.{neutral}_proj" for neutral in ("gate", "up", "down")},
}
# Names outside of the layers
_OWN = {"output": "lm_head.weight", "embedding": "embed_tokens.weight"}  # if a head does not use the target's
_EAGLE3_EXTRAS = {
    **_OWN,
    "d2t": "d2t",
    "input_norm": "input_norm.weight",
    **{f"fc_norm.{i}": f"fc_norm.{i}.weight" for i in range(3)},
}
_DFLASH = {"fc": "fc.weight", "feature_norm": "hidden_norm.weight", "output_norm": "norm.weight"}
_DFLASH_EXTRAS = {
    **_OWN,
    "d2t": "d2t",
    "markov_1": "markov_head.markov_w1.weight",
    "markov_2": "markov_head.markov_w2.weight",
    "confidence": "confidence_head.proj.weight",
}
_PART = re.compile(r"\.(?:weight|bias|scales|biases)$")
_LAYER_NUMBER = re.compile(r"layers\.(\d+)\.")
_UNSUPPORTED = {
    "mlp.shared_experts.": "a mixture of experts that is not Qwen's",
    "mlp.gate.e_score_correction_bias": "a mixture of experts that is not Qwen's",
    "self_attn.kv_a_proj_with_mqa.": "latent attention",
}
_QWEN_MTP = re.compile(r"(?P<prefix>.*?)pre_fc_norm_hidden\.weight$")
_DEEPSEEK_MTP = re.compile(r"(?P<prefix>.*?)eh_proj\.weight$")


def eagle3_names(names: Iterable[str]) -> dict[str, str]:
    """The names of an EAGLE-3 head. `input_norm` norms the concatenated features, `fc_norm.0` to `fc_norm.2` each one.

    Raises InvalidModelFile if a tensor is missing or the head has several layers.
    """
    own = _strip(names)
    if _count_layers(own) > 1:
        raise InvalidModelFile("The EAGLE-3 head has more than one layer; heads of one are read.", hint=HEAD_HINT)
    prefix = "layers.0." if any(name.startswith("layers.0.") for name in own) else "midlayer."  # speculators; SafeAI
    norms = {"embedding_norm": f"{prefix}input_layernorm.weight", "feature_norm": f"{prefix}hidden_norm.weight"}
    wanted = {**norms, "fc": "fc.weight", "output_norm": "norm.weight"}
    found = _find(own, "EAGLE-3", wanted, _EAGLE3_EXTRAS, {"": prefix})
    del found["attention_norm"]  # it is that of the embeddings
    return found


def eagle_names(names: Iterable[str]) -> dict[str, str]:
    """The names of an EAGLE-1 or EAGLE-2 head. Raises InvalidModelFile if a tensor is missing."""
    own = _strip(names)
    return _find(own, "EAGLE", {"fc": "fc.weight"}, _OWN, _number_layers(own))


def dflash_names(names: Iterable[str]) -> dict[str, str]:
    """The names of a DFlash or DSpark head. Raises InvalidModelFile for missing and unknown tensors."""
    own = _strip(names)
    found = _find(own, "DFlash", _DFLASH, _DFLASH_EXTRAS, _number_layers(own))
    known = {_PART.sub("", name) for name in (*found.values(), "t2d")}
    if unknown := sorted(name for name in own.values() if _PART.sub("", name) not in known):
        raise InvalidModelFile(f"The head has the tensor {unknown[0]}, which is not run.", hint=HEAD_HINT)
    return found


def mtp_names(names: Iterable[str]) -> dict[str, str]:
    """The names of an MTP layer, which are Qwen's or DeepSeek's. The file may hold the target too.

    Of a mixture of experts `gate`, `up` and `down` are those of all experts; `shared_*` are of an expert that sees all
    tokens. Raises InvalidModelFile if a tensor is missing, for several layers, and for layers of other kinds.
    """
    own = {name: name for name in names}
    qwen = sorted({found["prefix"] for name in own if (found := _QWEN_MTP.match(name))})
    deepseek = sorted({found["prefix"] for name in own if (found := _DEEPSEEK_MTP.match(name))})
    if len(qwen) + len(deepseek) != 1 or any(name.startswith(f"{qwen[0]}layers.1.") for name in own if qwen):
        raise InvalidModelFile("The file does not have one MTP layer; others are not run.", hint=HEAD_HINT)
    (outer,) = qwen or deepseek
    if qwen:
        prefix, extra = f"{outer}layers.0.", {neutral: f"{outer}{name}" for neutral, name in _OWN.items()}
        outside = ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    else:
        prefix, outside = outer, ("eh_proj", "enorm", "hnorm", "shared_head.norm")
        extra = {"output": f"{outer}shared_head.head.weight", "embedding": f"{outer}embed_tokens.weight"}
    for part, what in _UNSUPPORTED.items():
        if any(name.startswith(f"{prefix}{part}") for name in own):
            raise InvalidModelFile(f"The MTP layer has {what}, which is not run.", hint=HEAD_HINT)
    neutrals = ("fc", "embedding_norm", "feature_norm", "output_norm")
    wanted = {neutral: f"{outer}{name}.weight" for neutral, name in zip(neutrals, outside, strict=True)}
    is_mixture = f"{prefix}mlp.gate.weight" in own
    layer = {**_LAYER, **_MIXTURE} if is_mixture else _LAYER
    extra |= {neutral: f"{prefix}{name}.weight" for neutral, name in _SHARED_EXPERT.items() if is_mixture}
    return _find(own, "MTP", wanted, extra, {"": prefix}, layer)


HEAD_NAMES: Mapping[str, Callable[[Iterable[str]], dict[str, str]]] = {
    "eagle3": eagle3_names,
    "eagle": eagle_names,
    "mtp": mtp_names,
    "dflash": dflash_names,
    "dspark": dflash_names,
}


def _strip(names: Iterable[str]) -> dict[str, str]:
    """Names without the prefix `model.` -> names in the file."""
    return {name.removeprefix("model."): name for name in names}


def _count_layers(own: Iterable[str]) -> int:
    """The number of layers of a head; 1 if it does not number them."""
    return len({found[1] for name in own if (found := _LAYER_NUMBER.match(name))}) or 1


def _number_layers(own: Iterable[str]) -> dict[str, str]:
    """Layer prefixes in neutral names -> prefixes in the file."""
    return {f"{layer}.": f"layers.{layer}." for layer in range(_count_layers(own))}


def _find(
    own: Mapping[str, str],
    kind: str,
    wanted: Mapping[str, str],
    extra: Mapping[str, str],
    layers: Mapping[str, str],
    layer: Mapping[str, str] = _LAYER,
) -> dict[str, str]:
    """The file's own names of all `wanted` tensors, and of those of `extra` that it has, by neutral name.

    `wanted` and `extra` map neutral names to `own` names; the tensors of layers are added to them. `layers` maps the
    prefix of each layer in neutral names to its prefix in the file, and `layer` has the tensors that each needs. Raises
    InvalidModelFile if a wanted tensor is missing.
    """
    wanted, extra = dict(wanted), dict(extra)
    for before, prefix in layers.items():
        wanted |= {f"{before}{neutral}": f"{prefix}{name}.weight" for neutral, name in layer.items()}
        extra |= {f"{before}{neutral}": f"{prefix}{name}.weight" for neutral, name in _LAYER_EXTRAS.items()}
    if missing := [name for name in wanted.values() if name not in own]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise InvalidModelFile(f"The {kind} head lacks the tensor {missing[0]}{more}.", hint=HEAD_HINT)
    return {neutral: own[name] for neutral, name in (wanted | extra).items() if name in own}


def read_draft_ids(d2t: np.ndarray, vocab_size: int) -> np.ndarray:
    """The target's id of every draft id, int32 [draft vocabulary].

    `d2t` has offsets (safetensors), which are added to the draft id, or the target's ids (GGUF). Either way the
    target's ids ascend and are below `vocab_size`, in tokens. If both readings fit, `d2t` itself ascends, which
    offsets do only if no two neighbours of the vocabulary are kept: it is read as absolute. Raises InvalidModelFile
    if neither fits.
    """
    if d2t.ndim == 1 and len(d2t) and d2t.dtype.kind in "iu" and len(d2t) <= vocab_size:
        values = d2t.astype(np.int64)
        if _ascends(values, vocab_size):
            return values.astype(np.int32)
        if (
            values.min() >= 0
            and values.max() < vocab_size
            and _ascends(shifted := values + np.arange(len(values)), vocab_size)
        ):
            return shifted.astype(np.int32)
    raise InvalidModelFile(
        f"The head's table of draft tokens (d2t, {len(d2t) if d2t.ndim else 0:,} entries) does not name tokens of a "
        f"vocabulary of {vocab_size:,}.",
        hint="The head is for another model. Use --draft ngram, or another head.",
    )


def _ascends(ids: np.ndarray, vocab_size: int) -> bool:
    return bool(ids[0] >= 0 and ids[-1] < vocab_size and (np.diff(ids) > 0).all())
