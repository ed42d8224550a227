"""Gemma 4 assistants, a few layers of mlx-lm's gemma4 that draft with the target's own keys and values.

Their layers have queries alone. Those with a window attend to what the target's last layer with a window holds, the
others to the last full one. A row is a token and the hidden state before it; every drafted token has the position of
the root, since the cache ends there.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.gemma4_text import DecoderLayer, Gemma4TextModel, ModelArgs

from edgespec.backends.attached_draft import OTHER_HEAD, Unsupported
from edgespec.backends.mlx.heads.draft_vocabulary import DraftVocabulary
from edgespec.backends.mlx.heads.networks import Arrays
from edgespec.backends.mlx.heads.runner import HeadNetwork
from edgespec.backends.mlx.heads.target_parts import TargetParts
from edgespec.backends.mlx.library import device, map_errors
from edgespec.backends.mlx.session import MlxSession
from edgespec.errors import InvalidModelFile, reason_of
from edgespec.formats.heads import HEAD_HINT, HeadSpec
from edgespec.formats.mlx_folder import read_json

_LEFT_OUT = "masked_embedding."  # a shorter way to score a large vocabulary


class Assistant(nn.Module):  # type: ignore[misc]
    """The weights of an assistant, by the names of its files. H is the target's hidden size, h its own."""

    def __init__(self, args: ModelArgs, hidden_size: int) -> None:
        super().__init__()
        self.model = Gemma4TextModel(replace(args, num_kv_shared_layers=0))
        queries = replace(args, num_kv_shared_layers=args.num_hidden_layers)  # without keys and values
        self.model.layers = [DecoderLayer(queries, layer) for layer in range(args.num_hidden_layers)]
        self.pre_projection = nn.Linear(2 * hidden_size, args.hidden_size, bias=False)
        self.post_projection = nn.Linear(args.hidden_size, hidden_size, bias=False)


class AssistantNetwork(HeadNetwork):
    """An assistant beside its target, whose embeddings it reads; it has no keys and values of its own."""

    def __init__(self, module: Assistant, trunk: Any, vocab_size: int, nbytes: int) -> None:
        """`trunk` is mlx-lm's model around the target's layers."""
        self.nbytes = nbytes
        self.vocabulary = DraftVocabulary(None, vocab_size)
        self._module = module
        self._trunk = trunk
        self._outputs = [module.model.embed_tokens.as_linear]
        kinds = [layer.layer_type for layer in trunk.layers]
        self._sources = {kind: trunk.previous_kvs[len(kinds) - 1 - kinds[::-1].index(kind)] for kind in set(kinds)}

    def open_caches(self, target: MlxSession, position: int) -> Any:
        """The position, and by the type of a layer the keys and values of the target that a row there attends to."""
        windows = {"sliding_attention": self._module.model.window_size - 1}
        entries = target.entries
        return position, {kind: entries[at].before(position, windows.get(kind)) for kind, at in self._sources.items()}

    def run(self, tokens: Any, states: Any, caches: Any) -> Any:
        """Output [1, h], normed, of a token [1] and a state [1, H]."""
        position, held = caches
        embedded = self._trunk.embed_tokens(tokens) * self._trunk.embed_scale
        joined = mx.concatenate([embedded, states.astype(embedded.dtype)], axis=-1)
        h = self._module.pre_projection(joined)[None]
        for layer in self._module.model.layers:
            h, _, _ = layer(h, shared_kv=held[layer.layer_type], offset=position)
        return self._module.model.norm(h)[0]

    def feed_back(self, output: Any) -> Any:
        return self._module.post_projection(output)

    def score(self, output: Any, n: int = 1) -> Any:
        return self.vocabulary.spread(self._outputs[0](output).astype(mx.float32))


def read_assistant(folder: Path, spec: HeadSpec, arrays: Arrays, target: TargetParts) -> AssistantNetwork:
    config = read_json(folder / "config.json")
    arrays = {name: each for name, each in arrays.items() if not name.startswith(_LEFT_OUT)}
    try:
        args = ModelArgs.from_dict({**(config.get("text_config") or config), "hidden_size_per_layer_input": 0})
        module = Assistant(args, spec.hidden_size)
        if isinstance(quantization := config.get("quantization"), dict):
            group, bits = quantization["group_size"], quantization["bits"]
            nn.quantize(module, group, bits, class_predicate=lambda path, _: f"{path}.scales" in arrays)
        module.load_weights(list(arrays.items()))
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
        raise InvalidModelFile(f"{folder.name} is no assistant: {reason_of(error)}.", hint=HEAD_HINT) from error
    if args.vocab_size != target.vocab_size:
        raise Unsupported(
            f"the head is for a vocabulary of {args.vocab_size:,} tokens; the model has {target.vocab_size:,}.",
            hint=OTHER_HEAD,
        )
    if not device().on_gpu:
        module.set_dtype(mx.float32)
    with map_errors():
        mx.eval(module.parameters())
    nbytes = sum(each.nbytes for each in arrays.values())
    return AssistantNetwork(module, _find_trunk(target.model, module), target.vocab_size, nbytes)


def _find_trunk(target: Any, module: Assistant) -> Any:
    """The module around the target's layers. Raises Unsupported if the assistant's do not fit them."""
    wanted = _list_kinds(module.model)
    for trunk in target.modules():
        if hasattr(trunk, "previous_kvs") and wanted <= _list_kinds(trunk):
            return trunk
    raise Unsupported("the assistant is that of another model.", hint=OTHER_HEAD)


def _list_kinds(trunk: Any) -> set[tuple[str, int]]:
    """(type of attention, width of a head) of the layers."""
    return {(layer.layer_type, layer.self_attn.head_dim) for layer in trunk.layers}
