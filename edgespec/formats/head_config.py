"""The head that a folder's config.json describes or, if it is silent, the names and shapes of its tensors.

Dialects: SafeAI, speculators, NVIDIA, AngelSlim and SpecForge for EAGLE; z-lab for DFlash; DSpark; Medusa; Hydra; the
MTP layers of Hugging Face checkpoints. Layers are converted to HeadSpec's inputs as each dialect documents them:

- `eagle_aux_hidden_state_layer_ids` and `aux_hidden_state_layer_ids` at the top level are inputs (speculators, vLLM).
- The same inside `eagle_config` are outputs (NVIDIA, SpecForge): the output of layer n is the input n + 1.
- `target_layer_ids` of DFlash and DSpark are outputs too.

Files do not always follow this: a probe of the head on its target may correct it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from edgespec.errors import InvalidModelFile
from edgespec.formats.head_tensors import eagle3_names
from edgespec.formats.heads import HEAD_HINT, USUAL_BLOCK, HeadKind, HeadSpec

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
    """`shapes`, in which matrices that MLX has quantized have the shapes that they had before.

    These follow from the shapes of their scales, of which each group of columns has one.
    """
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
