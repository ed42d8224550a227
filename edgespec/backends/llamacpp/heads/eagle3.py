"""EAGLE-3 (Li et al. 2025): one layer that drafts from hidden states of the target."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from edgespec.backends.attached_draft import Unsupported
from edgespec.backends.llamacpp.heads.checks import OpenContext, check_ids, check_key_sizes, require
from edgespec.backends.llamacpp.heads.contexts import Eagle3Context
from edgespec.backends.llamacpp.model import LlamaModel
from edgespec.formats.gguf_validate import read_file
from edgespec.formats.heads import HeadSpec

_N_LAYERS = 3  # whose inputs llama.cpp's encoder takes


def prepare_eagle3(target: LlamaModel, path: Path, spec: HeadSpec) -> OpenContext:
    layers = spec.layers or ()
    if spec.feeds_normed or spec.norm_before_fc == "each" or len(layers) != _N_LAYERS:
        raise Unsupported(
            f"llama.cpp runs EAGLE-3 heads over {_N_LAYERS} layers of the target, and no other dialect.",
            hint="Use --draft auto.",
        )
    header, vocab_size = read_file(path), target.tokenizer.vocab_size
    require(header, header.own("block_count") == 1, "an EAGLE-3 head has one layer")
    check_key_sizes(header)
    embedding, output = header.shape("token_embd.weight"), header.shape("output.weight")
    is_fitting = (embedding is not None and output is not None) or spec.size == spec.hidden_size
    require(header, is_fitting, "it needs embeddings and an output matrix of its own size")
    embedded, rows = ((shape or (vocab_size,))[-1] for shape in (embedding, output))
    of = f"and the model {vocab_size} tokens"
    require(header, embedded == vocab_size, f"its embeddings have {embedded} rows, {of}")
    if (d2t := header.tensor("d2t")) is not None:
        check_ids(header, path, d2t, rows, vocab_size)
    else:
        require(header, rows == vocab_size, f"its output matrix has {rows} rows, {of}")
    return partial(Eagle3Context, width=len(layers) * spec.hidden_size)
