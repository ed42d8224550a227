"""Gemma 4 assistants on MLX: a few layers of mlx-lm's gemma4 that draft with the target's own keys and values.

Their layers have queries alone. Those with a window attend to what the target's last layer with a window holds, the
others to the last full one. A row is a token and the hidden state before it; every drafted token has the position of
the root, since the cache ends there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.gemma4_text import DecoderLayer, Gemma4TextModel, ModelArgs

from edgespec.backends.attached_draft import Features, Unsupported
from edgespec.backends.mlx.draft_vocabulary import DraftVocabulary, OneMatrix, choose_scorer
from edgespec.backends.mlx.head_parts import OTHER_HEAD, read_arrays, read_target
from edgespec.backends.mlx.library import device, map_errors, read
from edgespec.backends.mlx.pair_heads import roll_out
from edgespec.backends.mlx.session import MlxSession
from edgespec.core.protocols import CheckCancelled, Draft
from edgespec.core.sampling import Logits
from edgespec.core.scores import Scores
from edgespec.errors import BackendError, InvalidModelFile, reason_of
from edgespec.formats.head_tensors import HEAD_HINT
from edgespec.formats.heads import HeadSpec
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


class AssistantNetwork(OneMatrix):
    """An assistant beside its target, whose embeddings it reads."""

    layers = ()  # the last hidden state

    def __init__(self, module: Assistant, trunk: Any, vocab_size: int, nbytes: int) -> None:
        """`trunk` is mlx-lm's model around the target's layers."""
        self.nbytes = nbytes
        self.vocabulary = DraftVocabulary(None, vocab_size)
        self._module = module
        self._trunk = trunk
        self._output = module.model.embed_tokens.as_linear
        kinds = [layer.layer_type for layer in trunk.layers]
        self._sources = {kind: trunk.previous_kvs[len(kinds) - 1 - kinds[::-1].index(kind)] for kind in set(kinds)}

    def fetch(self, entries: Sequence[Any], position: int) -> dict[str, Any]:
        """By the type of a layer the keys and values that a row at `position` attends to, of the target's caches."""
        windows = {"sliding_attention": self._module.model.window_size - 1}
        return {kind: entries[at].before(position, windows.get(kind)) for kind, at in self._sources.items()}

    def run(self, token: Any, state: Any, held: dict[str, Any], position: int) -> Any:
        """Output [1, h], normed, of a `token` [1] and a `state` [1, H]."""
        embedded = self._trunk.embed_tokens(token) * self._trunk.embed_scale
        joined = mx.concatenate([embedded, state.astype(embedded.dtype)], axis=-1)
        h = self._module.pre_projection(joined)[None]
        for layer in self._module.model.layers:
            h, _, _ = layer(h, shared_kv=held[layer.layer_type], offset=position)
        return self._module.model.norm(h)[0]

    def feed_back(self, output: Any) -> Any:
        """The state [1, H] that stands for the target's where it has none yet."""
        return self._module.post_projection(output)

    def score(self, output: Any) -> Any:
        """Logits [1, V] float32."""
        return self.vocabulary.spread(self._output(output).astype(mx.float32))


class AssistantSession:
    """A DraftSession without a cache: it reads the target's and the state of the token before the root."""

    is_async = True

    def __init__(
        self, network: AssistantNetwork, target: MlxSession, features: Features[Any], check: CheckCancelled
    ) -> None:
        """`features` are those of `target`, whose tap ends with this session."""
        self._network = self._scorer = network
        self._target = target
        self._features = features
        self._check = check
        self._text: list[int] = []
        self._base = 0  # position of the root
        self._held: dict[str, Any] = {}
        self._output: Any = None  # [1, h] of the last row

    @property
    def text(self) -> Sequence[int]:
        return self._text

    def begin(self, text: Sequence[int]) -> None:
        """Nothing is cached."""
        self._text = []

    def pending_tokens(self, text: Sequence[int]) -> int:
        """1: a draft reads one state."""
        return min(1, len(text) - 1)

    def read(self, text: Sequence[int], window: int) -> Logits | None:
        """As core.drafter.DraftSession. None for a text of one token, and at the end of the context."""
        return self._host_scores() if self._start(text) else None

    def step(self, token: int) -> Logits | None:
        if len(self._text) >= self._target.capabilities.context_size:
            return None
        with map_errors():
            self._continue(mx.array([token]))
        self._text.append(token)
        return self._host_scores()

    def rollout(self, text: Sequence[int], window: int, n: int) -> tuple[Draft, Scores] | None:
        if not self._start(text):
            return None
        with map_errors():
            return roll_out(self._score, self._continue, min(n, self._target.capabilities.context_size - len(text) + 1))

    def close(self) -> None:
        self._target.untap()
        self._held, self._output = {}, None
        mx.clear_cache()

    def _start(self, text: Sequence[int]) -> bool:
        """Run the root of `text`; False where there is no state before it, or no room.

        Raises BackendError, Cancelled.
        """
        self._base = last = len(text) - 1
        if not self._features.start < last < self._target.capabilities.context_size:
            return False
        if self._features.end < last or self._target.position < last:
            raise BackendError("the head has no hidden states of the text.", hint="Report this as a bug.")
        self._check()
        self._text = list(text)
        self._scorer = choose_scorer(self._network, text)
        self._features.release(last - 1)
        with map_errors():
            self._held = self._network.fetch(self._target.entries, last)
            state = self._features.take(last - 1, last)
            self._output = self._network.run(mx.array(text[-1:]), state, self._held, last)
        return True

    def _continue(self, token: Any) -> None:
        """Run a drafted `token` [1]."""
        state = self._network.feed_back(self._output)
        self._output = self._network.run(token, state, self._held, self._base)

    def _score(self) -> Any:
        """Scores [1, V] after the last token."""
        return self._scorer.score(self._output)

    def _host_scores(self) -> Logits:
        with map_errors():
            logits: Logits = read(self._score())[0][0]
        return logits


def read_assistant(folder: Path, spec: HeadSpec, target: Any) -> AssistantNetwork:
    """The assistant in a folder with config.json and safetensors, for mlx-lm's model `target`.

    Raises InvalidModelFile, Unsupported, CacheError, BackendError.
    """
    parts = read_target(target)
    parts.check(spec)
    config = read_json(folder / "config.json")
    arrays = {name: each for name, each in read_arrays(folder).items() if not name.startswith(_LEFT_OUT)}
    try:
        args = ModelArgs.from_dict({**(config.get("text_config") or config), "hidden_size_per_layer_input": 0})
        module = Assistant(args, spec.hidden_size)
        if isinstance(quantization := config.get("quantization"), dict):
            group, bits = quantization["group_size"], quantization["bits"]
            nn.quantize(module, group, bits, class_predicate=lambda path, _: f"{path}.scales" in arrays)
        module.load_weights(list(arrays.items()))
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
        raise InvalidModelFile(f"{folder.name} is no assistant: {reason_of(error)}.", hint=HEAD_HINT) from error
    if args.vocab_size != parts.vocab_size:
        raise Unsupported(
            f"the head is for a vocabulary of {args.vocab_size:,} tokens; the model has {parts.vocab_size:,}.",
            hint=OTHER_HEAD,
        )
    if not device().on_gpu:
        module.set_dtype(mx.float32)
    with map_errors():
        mx.eval(module.parameters())
    nbytes = sum(each.nbytes for each in arrays.values())
    return AssistantNetwork(module, _find_trunk(target, module), parts.vocab_size, nbytes)


def _find_trunk(target: Any, module: Assistant) -> Any:
    """The module around the target's layers. Raises Unsupported where the assistant's do not fit them."""
    for trunk in target.modules():
        if hasattr(trunk, "previous_kvs"):
            kinds = {(layer.layer_type, _width(layer)) for layer in trunk.layers}
            if {(layer.layer_type, _width(layer)) for layer in module.model.layers} <= kinds:
                return trunk
    raise Unsupported("the assistant is that of another model.", hint=OTHER_HEAD)


def _width(layer: Any) -> int:
    """Numbers of a head."""
    width: int = layer.self_attn.head_dim
    return width
