"""Trained heads: small networks that draft from a target's hidden states. What a head's file says of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from edgespec.errors import InvalidModelFile

HEAD_HINT = "Download the head again, or use --draft ngram."
HeadKind = Literal["eagle3", "eagle", "mtp", "gemma4-assistant", "dflash", "dspark", "medusa", "hydra"]

USUAL_BLOCK = 16  # positions of a DFlash block if its file states none, as llama.cpp has it


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """A head, whatever format its file has.

    hidden_size         of the target; 0 if the file does not say
    layers              of the target, whose inputs are concatenated in this order: 0 has the embeddings, the number of
                        layers names the output of the last one before the final norm. Empty: the last hidden state
                        after the final norm. None: the file does not say, see `complete`
    size                the head's own hidden size
    norm_before_residual  EAGLE-3: whether the residual starts from the normed feature
    norm_before_fc      EAGLE-3: 'all' norms the concatenated features, 'each' every one of them (EAGLE-3.1)
    feeds_normed        whether the head's state is fed back after its last norm
    block_size          positions of a block, of heads that draft one
    mask_token          the id that fills a block
    predicts_at_root    DSpark: whether the first row of a block, the root's, predicts too
    in_target           whether the file holds the target too
    """

    kind: HeadKind
    hidden_size: int
    layers: tuple[int, ...] | None
    size: int
    norm_before_residual: bool = False
    norm_before_fc: Literal["none", "all", "each"] = "none"
    feeds_normed: bool = False
    block_size: int = 1
    mask_token: int | None = None
    predicts_at_root: bool = False
    in_target: bool = False

    def complete(self, target_layers: int) -> HeadSpec:
        """Names the layers that EAGLE-3 heads read of a target with `target_layers`, if the file names none."""
        usual = 2, target_layers // 2, target_layers - 3
        return self if self.layers is not None else replace(self, layers=usual)


# Heads in folders: what config.json says of one, and if it is silent, the names and shapes of the tensors.
#
# Dialects: SafeAI, speculators, NVIDIA, AngelSlim and SpecForge for EAGLE; z-lab for DFlash; DSpark; Medusa; Hydra; the
# MTP layers of Hugging Face checkpoints. Layers are converted to HeadSpec's inputs as each dialect documents them:
#
# - `eagle_aux_hidden_state_layer_ids` and `aux_hidden_state_layer_ids` at the top level are inputs (speculators, vLLM).
# - The same inside `eagle_config` are outputs, one less (NVIDIA, SpecForge).
# - `target_layer_ids` of DFlash and DSpark are outputs.
#
# Files do not always follow this: a probe of the head on its target may correct it.


Shapes = Mapping[str, tuple[int, ...]]
_MAX_SIZE = 2**24
_AUX_KEYS = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")
_OUTPUT_KEYS = ("target_layer_ids", "dspark_target_layer_ids")
_MEDUSA_LAYER = re.compile(r"(?:medusa_head\.|medusa_heads\.)?0\.0\.linear\.weight$")
_MEDUSA_OUTPUT = re.compile(r"(?:medusa_head\.|medusa_heads\.)?0\.\d+\.weight$")
_HYDRA_LAYER = re.compile(r"hydra_mlp\.0\.\d+\.linear\.weight$")
_PREFIX = "prefix_embeding_layer."
_HYDRA_OUTPUT = re.compile(r"hydra_lm_head\.0\.(?:1\.)?weight$")
_EAGLE = re.compile(
    r"lmeagle\b|\beagle(?:model|speculator|forcausallm)?(?: |$)"
)  # Eagle2 and Eagle2.5 are vision models
_MTP = re.compile(r"(?:^|\.)mtp\.|\.eh_proj\.weight$|^pre_fc_norm_hidden\.weight$")
_FIRST_LAYER = re.compile(r"(?:^|\.)layers\.0\.")


def read_config_head(config: Mapping[str, Any], shapes: Shapes) -> HeadSpec | None:
    """The head that `config` and the tensors, shape by name, describe; None if there is none.

    `shapes` is empty if no weights are at hand: then the config alone decides. Raises InvalidModelFile for a head
    whose tensors are not those of its kind, or whose config contradicts them.
    """
    own = {name.removeprefix("model."): shape for name, shape in unpack_shapes(config, shapes).items()}
    settings = _Settings(config)
    kind = _find_named_kind(settings)
    if kind == "dflash" and any("markov" in key for key in (*own, *config)):
        kind = "dspark"
    kind = kind or _find_kind_of_tensors(own)
    return None if kind is None else _READERS[kind](kind, settings, own)


def unpack_shapes(config: Mapping[str, Any], shapes: Shapes) -> Shapes:
    """Shapes with those of matrices that MLX has quantized as they were before: each group of columns has a scale."""
    table = config.get("quantization")
    if not isinstance(table, dict):
        return shapes
    found = dict(shapes)
    for name, scales in shapes.items():
        stem = name.removesuffix(".scales")
        own = table.get(stem)
        group = (own if isinstance(own, dict) else table).get("group_size")
        if stem != name and f"{stem}.weight" in shapes and len(scales) == 2 and type(group) is int:
            found[f"{stem}.weight"] = (scales[0], scales[1] * group)
    return found


class _Settings:
    """A config: its own keys, then those of the tables that dialects nest."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.own = config
        self._tables = [config, *(t for key in ("text_config", "transformer_layer_config") if (t := self.table(key)))]

    def table(self, key: str) -> Mapping[str, Any]:
        found = self.own.get(key)
        return found if isinstance(found, dict) else {}

    def integer(self, *keys: str, tables: Iterable[Mapping[str, Any]] = ()) -> int | None:
        """The first positive integer under one of `keys`, of `tables` before those of the config."""
        for table in (*tables, *self._tables):
            for key in keys:
                number = table.get(key)
                if isinstance(number, int) and not isinstance(number, bool) and 0 < number <= _MAX_SIZE:
                    return number
        return None

    def is_set(self, key: str) -> bool:
        return self.own.get(key) is True or self.table("eagle_config").get(key) is True

    @property
    def words(self) -> str:
        """What names the kind, in lower case: architectures, model type, the algorithm of speculators."""
        architectures = self.own.get("architectures")
        named = architectures if isinstance(architectures, list) else []
        return " ".join(
            map(str, [*named, self.own.get("model_type"), self.table("speculators_config").get("algorithm")])
        ).lower()


def _find_named_kind(settings: _Settings) -> HeadKind | None:
    words, config = settings.words, settings.own
    is_reduced = settings.integer("num_hidden_layers") == 1 and settings.integer("draft_vocab_size")
    signs: dict[HeadKind, Iterable[object]] = {
        "dspark": ["dspark" in words],
        "dflash": ["dflash" in words],
        "eagle3": ["eagle3" in words],
        "medusa": ["medusa" in words],
        "eagle": [_EAGLE.search(words)],
        "gemma4-assistant": ["gemma4assistant" in words, "gemma4_assistant" in words],
    }
    further: dict[HeadKind, Iterable[object]] = {
        "dflash": ["dflash_config" in config, "assistant" in words and "target_layer_ids" in config],
        "medusa": ["medusa_num_heads" in config],
        "hydra": ["hydra_num_heads" in config],
        "eagle3": ["eagle_config" in config, is_reduced],
    }
    return _first_kind(signs) or _first_kind(further)


def _first_kind(signs: Mapping[HeadKind, Iterable[object]]) -> HeadKind | None:
    return next((kind for kind, each in signs.items() if any(each)), None)


def _find_kind_of_tensors(own: Shapes) -> HeadKind | None:
    fc = own.get("fc.weight", ())
    is_double = len(fc) == 2 and fc[1] == 2 * fc[0]
    is_bare = "layers.0.input_layernorm.weight" not in own  # EAGLE-1 removed the norm before its first attention
    signs: dict[HeadKind, Iterable[object]] = {
        "dspark": ("markov_w1" in name for name in own),
        "eagle3": (fc and f"{prefix}.hidden_norm.weight" in own for prefix in ("midlayer", "layers.0")),
        "dflash": [fc and "hidden_norm.weight" in own],
        "eagle": [is_double and is_bare and "layers.0.self_attn.q_proj.weight" in own],
        "hydra": (name.startswith(("hydra_mlp.", "hydra_lm_head.", _PREFIX)) for name in own),
        "medusa": map(_MEDUSA_LAYER.match, own),
        "mtp": map(_MTP.search, own),
    }
    return _first_kind(signs)


def _read_eagle3(kind: HeadKind, settings: _Settings, own: Shapes) -> HeadSpec:
    if own:
        eagle3_names(own)
    table = settings.table("eagle_config")
    layers = _find_layers(settings.own, _AUX_KEYS, 0) or _find_layers(table, _AUX_KEYS, 1)
    if table.get("use_aux_hidden_state") is False:
        layers = ()
    size, width = _find_fc(settings, own)
    hidden_size = settings.integer("target_hidden_size")
    parts = 3 if layers is None else max(len(layers), 1)
    hidden_size = hidden_size or (size if width is None else width // parts)
    _check_width(width, parts, hidden_size)
    before: Literal["none", "all", "each"] = "none"
    if any(name.startswith("fc_norm.") for name in own):
        before = "each"
    elif "input_norm.weight" in own or settings.is_set("norm_before_fc"):
        before = "all"
    return HeadSpec(
        kind,
        hidden_size,
        layers,
        size,
        norm_before_residual=settings.is_set("norm_before_residual"),
        norm_before_fc=before,
        feeds_normed=settings.is_set("norm_output"),
    )


def _read_dflash(kind: HeadKind, settings: _Settings, own: Shapes) -> HeadSpec:
    table = settings.table("dflash_config")
    layers = (
        _find_layers(settings.own, _AUX_KEYS, 0)
        or _find_layers(table, _OUTPUT_KEYS, 1)
        or _find_layers(settings.own, _OUTPUT_KEYS, 1)
    )
    size, width = _find_fc(settings, own)
    if layers:
        _check_width(width, len(layers), size)
    masks = (table.get("mask_token_id"), settings.own.get("mask_token_id"), settings.own.get("dspark_noise_token_id"))
    return HeadSpec(
        kind,
        size,
        layers,
        size,
        block_size=settings.integer("block_size", "dspark_block_size", tables=[table]) or USUAL_BLOCK,
        mask_token=next((each for each in masks if type(each) is int and each >= 0), None),
        predicts_at_root=kind == "dspark" and _predicts_at_root(settings.own),
    )


def _predicts_at_root(config: Mapping[str, Any]) -> bool:
    """Whether a DSpark block begins with a prediction, which it does not in the dialect of speculators."""
    stated = config.get("sample_from_anchor")
    return stated if isinstance(stated, bool) else not {"transformer_layer_config", _AUX_KEYS[1]} & set(config)


def _read_eagle(kind: HeadKind, settings: _Settings, own: Shapes) -> HeadSpec:
    size, width = _find_fc(settings, own)
    _check_width(width, 2, size)
    return HeadSpec(kind, size, (), size)


def _read_independent(kind: HeadKind, settings: _Settings, own: Shapes) -> HeadSpec:
    """Medusa and Hydra: several small networks over one hidden state, with an output matrix each or the target's."""
    layers = (shape for name, shape in own.items() if _MEDUSA_LAYER.match(name) or _HYDRA_LAYER.match(name))
    layer = next(layers, ())
    outputs = (shape for name, shape in own.items() if _MEDUSA_OUTPUT.match(name) or _HYDRA_OUTPUT.match(name))
    output = next((shape for shape in outputs if len(shape) == 2), (0, 0))
    size = settings.integer("hidden_size") or (layer[0] if layer else 0) or output[1]
    return HeadSpec(kind, size, (), size, in_target=_has_trunk(own))


def _read_mtp(kind: HeadKind, settings: _Settings, own: Shapes) -> HeadSpec:
    size = settings.integer("hidden_size") or 0
    in_target = not any(name.startswith("pre_fc_norm") for name in own) and _has_trunk(own)
    return HeadSpec(kind, size, (), size, feeds_normed=True, in_target=in_target)


def _read_assistant(kind: HeadKind, settings: _Settings, own: Shapes) -> HeadSpec:
    hidden_size, size = settings.integer("backbone_hidden_size") or 0, settings.integer("hidden_size") or 0
    return HeadSpec(kind, hidden_size, (), size, feeds_normed=True)


_READERS: Mapping[HeadKind, Callable[[HeadKind, _Settings, Shapes], HeadSpec]] = {
    "eagle3": _read_eagle3,
    "eagle": _read_eagle,
    "mtp": _read_mtp,
    "gemma4-assistant": _read_assistant,
    "dflash": _read_dflash,
    "dspark": _read_dflash,
    "medusa": _read_independent,
    "hydra": _read_independent,
}


def _find_layers(table: Mapping[str, Any], keys: Iterable[str], shift: int) -> tuple[int, ...] | None:
    """The layers under one of `keys`, plus `shift`; None if they are not stated."""
    found = next((table[key] for key in keys if table.get(key)), None)
    if found is None:
        return None
    if not isinstance(found, list) or not all(type(each) is int and 0 <= each < 2**16 for each in found):
        raise InvalidModelFile(f"The head's config.json names the layers {str(found)[:60]}.", hint=HEAD_HINT)
    return tuple(layer + shift for layer in found)


def _find_fc(settings: _Settings, own: Shapes) -> tuple[int, int | None]:
    """The head's size, and how many values its first matrix reads; None if the tensors do not tell."""
    stated = settings.integer("hidden_size")
    shape = own.get("fc.weight")
    if shape is None:
        return stated or 0, None
    if len(shape) != 2 or (stated is not None and shape[0] != stated):
        raise InvalidModelFile(
            f"The head's fc.weight has the shape {shape}, its config.json the hidden size {stated}.", hint=HEAD_HINT
        )
    return shape[0], shape[1] if "fc.scales" not in own else None  # of a quantized matrix, whose columns are packed


def _check_width(width: int | None, parts: int, hidden_size: int) -> None:
    if width is not None and width != parts * hidden_size:
        raise InvalidModelFile(
            f"The head's fc.weight reads {width:,} values, not {parts} times {hidden_size:,}.", hint=HEAD_HINT
        )


def _has_trunk(own: Shapes) -> bool:
    """Whether there is a first layer that is no part of a head."""
    return any(_FIRST_LAYER.search(name) and not (_MTP.search(name) or name.startswith(_PREFIX)) for name in own)


# Tensors of heads: one set of neutral names for the dialects of each kind, and the ids of a reduced vocabulary.
#
# The function of a kind returns {neutral name: the file's own} of the names of a file's tensors, with or without the
# prefix `model.`. A head has all of _LAYER and, if the file has them, those of the tables of extras. The names of
# EAGLE and DFlash heads, which may have several layers, begin with the layer's number, such as `0.q`. Without
# `embedding` and `output` a head uses the target's.


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
    """The names of an EAGLE-3 head. `input_norm` is of the concatenated features, `fc_norm.0` to `fc_norm.2` of each.

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
    """The names of a file by what they are without a prefix."""
    return {name.removeprefix("model."): name for name in names}


def _count_layers(own: Iterable[str]) -> int:
    """Layers of a head that numbers them, one at least."""
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
    """The file's own name of all that is `wanted`, and of what it has of `extra`.

    Both are completed by the names of `layers`, the prefix of each in neutral names and in the file; `layer` has those
    that each has to have.
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
