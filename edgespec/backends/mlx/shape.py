"""A model of a common shape with random weights, to time forwards on."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import llama

from edgespec.backends.mlx.model import MlxModel, read_weights
from edgespec.backends.options import LoadOptions

GROUP = 64  # elements that share a scale, as mlx-lm quantizes


def open_shape(vocabulary: Path, *, width: int, feed_forward: int, blocks: int, bits: int | None) -> MlxModel:
    """A llama model of `blocks` blocks, with the tokenizer of a GGUF file; `bits` None: weights of 16.

    The time of a forward does not depend on the weights, but the probe of a model does. Raises BackendError.
    """
    from edgespec.backends.llamacpp.model import load

    words = load(vocabulary, LoadOptions(), vocabulary_only=True)
    words.close_with_tokenizer()
    arguments = llama.ModelArgs(
        model_type="llama",
        hidden_size=width,
        num_hidden_layers=blocks,
        intermediate_size=feed_forward,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 256,
        rms_norm_eps=1e-5,
        vocab_size=words.tokenizer.vocab_size,
    )
    network = llama.Model(arguments)
    if bits is None:
        network.set_dtype(mx.float16)
    else:
        nn.quantize(network, group_size=GROUP, bits=bits)
    read_weights(network)
    return MlxModel(network, words.tokenizer, None, 512, None)
