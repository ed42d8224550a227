"""Trained heads on llama.cpp, by kind: their contexts, and checks of files on which it would abort the process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from edgespec.backends.attached_draft import OTHER_HEAD, AttachedHead, Unsupported
from edgespec.backends.head_session import BlockHeadSession, HeadSession, check_hidden_size, read_block
from edgespec.backends.llamacpp.head_contexts import (
    AssistantContext,
    BlockContext,
    ChainContext,
    DraftContext,
    Eagle3Context,
    HeadContext,
)
from edgespec.backends.llamacpp.model import LlamaModel, load
from edgespec.backends.llamacpp.session import LlamaSession
from edgespec.backends.llamacpp.shape import count_blocks
from edgespec.core.drafter import BlockSession, DraftSession
from edgespec.core.protocols import CheckCancelled, Session
from edgespec.errors import reading
from edgespec.formats.gguf import Header, TensorInfo, join_parts
from edgespec.formats.gguf_validate import read_file
from edgespec.formats.heads import HeadKind, HeadSpec

OpenContext = Callable[..., DraftContext]
"""Makes a head's llama_context, given the library, the weights, the parameters and settings."""


class LlamaHead(AttachedHead):
    """A head beside its target."""

    def __init__(self, spec: HeadSpec, target: LlamaModel, weights: LlamaModel, open_context: OpenContext) -> None:
        """`close` frees `weights`, unless they are the target's."""
        super().__init__(spec.kind, target.tokenizer, 0 if weights is target else weights.path.stat().st_size)
        self._spec, self._weights, self._open_context = spec, weights, open_context

    def open_session(self, target: Session, check: CheckCancelled) -> DraftSession | BlockSession:
        assert isinstance(target, LlamaSession)
        sequence = {"sequence": target.sequence} if self.shares_kv else {}
        more_cells = self._spec.block_size if self._spec.block_size > 1 else 0
        features = target.tap(self._spec.layers or ())
        try:
            context = self._weights.open_beside(
                target,
                self._open_context,
                is_mtp=self._spec.kind in _MTP_KINDS,
                more_cells=more_cells,
                check=check,
                **sequence,
            )
        except BaseException:
            target.untap()
            raise
        kind = HeadSession if context.reads_pairs else BlockHeadSession
        return kind(context, target, features)

    def close(self) -> None:
        if not self._spec.in_target:
            self._weights.close()


def _require(header: Header, is_met: bool, problem: str) -> None:
    """Raises InvalidModelFile for a file on which llama.cpp would abort, perhaps after it has loaded it."""
    if not is_met:
        raise header.invalid(problem)


def _check_ids(header: Header, path: Path, d2t: TensorInfo, rows: int, vocab_size: int) -> None:
    """Raises InvalidModelFile unless `d2t` names a token of the target for each of the output matrix' `rows`."""
    is_whole = d2t.type.name == "I64" and d2t.shape == (rows,)
    _require(header, is_whole, f"d2t does not name a token for each of the {rows} rows of its output matrix")
    with reading(path):
        ids = np.fromfile(path, "<i8", rows, offset=header.data_offset + d2t.offset)
    is_known = len(ids) == rows and ids.min() >= 0 and ids.max() < vocab_size
    _require(header, bool(is_known), "d2t names tokens that the model does not have")


# EAGLE-3 (Li et al. 2025): one layer that drafts from hidden states of the target.


_N_LAYERS = 3  # whose inputs llama.cpp's encoder takes


def _prepare_eagle3(target: LlamaModel, path: Path, spec: HeadSpec) -> OpenContext:
    layers = spec.layers or ()
    if spec.feeds_normed or spec.norm_before_fc == "each" or len(layers) != _N_LAYERS:
        raise Unsupported(
            f"llama.cpp runs EAGLE-3 heads over {_N_LAYERS} layers of the target, and no other dialect.",
            hint="Use --draft auto.",
        )
    header, vocab_size = read_file(path), target.tokenizer.vocab_size
    _require(header, header.own("block_count") == 1, "an EAGLE-3 head has one layer")
    _check_key_sizes(header)
    embedding, output = header.shape("token_embd.weight"), header.shape("output.weight")
    is_fitting = (embedding is not None and output is not None) or spec.size == spec.hidden_size
    _require(header, is_fitting, "it needs embeddings and an output matrix of its own size")
    embedded, rows = ((shape or (vocab_size,))[-1] for shape in (embedding, output))
    of = f"and the model {vocab_size} tokens"
    _require(header, embedded == vocab_size, f"its embeddings have {embedded} rows, {of}")
    if (d2t := header.tensor("d2t")) is not None:
        _check_ids(header, path, d2t, rows, vocab_size)
    else:
        _require(header, rows == vocab_size, f"its output matrix has {rows} rows, {of}")
    return partial(Eagle3Context, width=len(layers) * spec.hidden_size)


def _check_key_sizes(header: Header) -> None:
    is_same = header.own("attention.key_length") == header.own("attention.value_length")
    _require(header, is_same, "its keys and values differ in size")


# MTP layers on llama.cpp (GGUF `nextn`): they draft from the target's last hidden state, after its norm.
#
# They lie in the target's own file, behind the layers of the target, or in a file of their own, with copies of the
# embeddings and the output matrix. llama.cpp runs one in a context of its own, whose rows are a token and the state of
# the token before. A pair has the position of that state; rotary positions are relative.


# Architectures with an MTP graph, of 0.3.36, and the tensors without which that aborts the process although the file
# loads. deepseek4's hidden states are wider than those of other layers, glm5-next's graph is not written yet.
_TENSORS: dict[str, tuple[str, ...]] = {
    "bailingmoe3": (),
    "cohere2moe": ("ffn_gate_inp",),
    "deepseek2": ("ffn_gate_inp", "attn_k_b"),
    "deepseek32": ("ffn_gate_inp", "attn_k_b"),
    "glm-dsa": ("ffn_gate_inp", "attn_k_b"),
    "glm4moe": ("ffn_gate_inp",),
    "hy_v3": (),
    "mimo2": ("attn_qkv", "ffn_gate", "ffn_up", "ffn_down"),
    "nemotron_h_moe": ("ffn_gate_inp", "nextn.shared_head_norm"),
    "qwen35": (),
    "qwen35moe": ("ffn_gate_inp",),
    "qwen3next": ("ffn_gate_inp",),
    "step35": (),
}
_CHAINS = ("hy_v3", "mimo2", "step35")  # whose graphs run several layers, one for each drafted token
_ALWAYS = ("nextn.eh_proj", "nextn.enorm", "nextn.hnorm")
_SAME_SHAPE = (
    *("embedding_length", "attention.key_length", "attention.value_length", "rope.dimension_count"),
    *("attention.key_length_mla", "attention.value_length_mla"),
)


def _prepare_mtp(target: LlamaModel, path: Path, spec: HeadSpec) -> OpenContext:
    header = _read_model(path)
    count = _check_layers(header, path)
    if not spec.in_target:
        whole = _read_model(target.path)
        is_same = header.architecture == whole.architecture and all(
            header.own(key) == whole.own(key) for key in _SAME_SHAPE
        )
        if not is_same or count_blocks(header) != count_blocks(whole):  # on which llama.cpp may abort
            raise Unsupported(f"{path.name} has the MTP layer of another model.", hint=OTHER_HEAD)
    elif path != target.path:
        raise Unsupported(f"the MTP layers in {path.name} draft for the model in that file alone.", hint=OTHER_HEAD)
    elif not target.options.mtp:
        raise Unsupported(f"{path.name} was loaded without its MTP layers.", hint="Open it again with --draft mtp.")
    return HeadContext if count == 1 else partial(ChainContext, count=count)


def _read_model(path: Path) -> Header:
    """The header of a file, or of all parts of a split one. Raises InvalidModelFile, CacheError."""
    first = read_file(path)
    count = first.integer("split.count") or 1
    names = [path.name.replace("-00001-of-", f"-{part:05}-of-") for part in range(2, count + 1)]
    return join_parts([first, *(read_file(path.with_name(name)) for name in names)])


def _check_layers(header: Header, path: Path) -> int:
    """The number of MTP layers. Raises Unsupported, InvalidModelFile where llama.cpp would abort the process."""
    architecture = header.architecture
    if architecture not in _TENSORS:
        raise Unsupported(f"llama.cpp runs no MTP layers of '{architecture}' models.", hint="Use --draft auto.")
    count, blocks = header.own("nextn_predict_layers") or 0, header.own("block_count") or 0
    if count > 1 and architecture not in _CHAINS:
        raise Unsupported(
            f"{path.name} has {count} MTP layers; llama.cpp runs one for '{architecture}'.", hint="Use --draft auto."
        )
    _require(header, 0 < count < blocks, f"{count} of its {blocks} layers are MTP layers")
    held = {tensor.name for tensor in header.tensors}
    for block in range(blocks - count, blocks):
        for name in (*_ALWAYS, *_TENSORS[architecture]):
            _require(header, f"blk.{block}.{name}.weight" in held, f"its MTP layer lacks {name}")
    if header.metadata.get(f"{architecture}.attention.temperature_scale"):
        raise Unsupported("llama.cpp runs no MTP layers with a temperature of attention.", hint="Use --draft auto.")
    return count


# Gemma 4 assistants on llama.cpp: a few layers that draft with the target's own keys and values.
#
# Their layers have queries alone, and attend to what the target's last two layers hold: those with a window to the last
# but one, the others to the last. A row is a token and the hidden state before it, as for an MTP layer; every drafted
# token has the position of the root, since the cache ends there.


_SAME = ("key_length", "value_length", "key_length_swa", "value_length_swa", "sliding_window")  # of attention


def _prepare_assistant(target: LlamaModel, path: Path, spec: HeadSpec) -> OpenContext:
    header, whole = read_file(path), read_file(target.path)
    is_whole = header.own("nextn_predict_layers") == header.own("block_count")
    _require(header, is_whole, "not all of its layers are the assistant's")
    has_size = header.own("embedding_length_out") != header.own("embedding_length")
    _require(header, has_size, "its embedding_length_out is not the target's hidden size")
    keys = [f"attention.{key}" for key in _SAME]
    is_same = whole.architecture == "gemma4" and all(header.own(key) == whole.own(key) for key in keys)
    own, last = _list_caches(header), _list_caches(whole)[-2:]
    if not is_same or [window for window, _ in last] != [1, 0] or not own or not set(own) <= set(last):
        raise Unsupported(f"{path.name} is the assistant of another model.", hint=OTHER_HEAD)
    return AssistantContext


def _list_caches(header: Header) -> list[tuple[int, int]]:
    """(whether it has a window, key-value heads) of each layer."""
    windows, heads = (header.per_block(f"attention.{key}") for key in ("sliding_window_pattern", "head_count_kv"))
    return list(zip(windows or (), heads or (), strict=False))


# DFlash and DSpark: several tokens in one forward over hidden states of the target.
#
# A block has the root and a mask token for each of the positions after it. Its rows see each other and the target's
# states before the root. DSpark adds to the logits of a row a bias that depends on the token before, for which the
# graph takes the most probable one of the row before (SpecForge's Markov head).


def _prepare_dflash(target: LlamaModel, path: Path, spec: HeadSpec) -> OpenContext:
    header = read_file(path)
    _check_dflash_file(header, path, target.tokenizer.vocab_size)
    block = read_block(spec, target.tokenizer.vocab_size)
    is_causal, width = header.metadata.get("dflash.attention.causal") is True, len(spec.layers or ()) * spec.hidden_size
    return partial(BlockContext, width=width, block=block, is_causal=is_causal)


def _check_dflash_file(header: Header, path: Path, vocab_size: int) -> None:
    """Raises InvalidModelFile, Unsupported unless llama.cpp runs the head for a target with `vocab_size` tokens."""
    for name, found in (
        ("DFlash2", header.shape("selector_hidden.weight")),  # which drafts by its selector and not by its logits
        ("DeepSeek V4's DSpark", header.own("hyper_connection_count")),
    ):
        if found:
            raise Unsupported(f"{path.name} is a head of the kind {name}, which is not run.", hint="Use --draft auto.")
    _check_key_sizes(header)
    heads = set(header.per_block("attention.head_count") or (0,))
    kv_heads = set(header.per_block("attention.head_count_kv") or heads)
    n, n_kv = max(heads), max(kv_heads)
    is_even = len(heads) == len(kv_heads) == 1 and min(n, n_kv) > 0 and n % n_kv == 0
    _require(header, is_even, "its layers differ in their heads, or heads do not share keys evenly")
    _check_rope(header, header.own("attention.key_length") or (header.own("embedding_length") or 0) // n)
    if (d2t := header.tensor("d2t")) is not None:
        output = header.shape("output.weight")
        _require(header, output is not None, "it has a reduced vocabulary and no output matrix")
        _check_ids(header, path, d2t, (output or (0,))[-1], vocab_size)


def _check_rope(header: Header, width: int) -> None:
    """Raises InvalidModelFile unless the rotation fits keys of `width` numbers."""
    rotated = header.own("rope.dimension_count")
    rotated = width if rotated is None else rotated
    _require(header, 0 <= rotated <= width and rotated % 2 == 0, f"it rotates {rotated} of {width} numbers of a key")
    sections = header.metadata.get("dflash.rope.dimension_sections")
    if isinstance(sections, int | np.ndarray):  # one number stands for all of them
        numbers = [sections] * 4 if isinstance(sections, int) else [int(number) for number in sections]
        is_sound = not any(numbers) or (numbers[0] > 0 and min(numbers) >= 0 and sum(numbers) <= width)
        _require(header, is_sound, f"its rotary embedding has the sections {numbers} of {width} numbers")


_MTP_KINDS = ("mtp", "gemma4-assistant")  # whose graph is one of its own beside that of the model in the file
_KINDS: dict[HeadKind, Callable[[LlamaModel, Path, HeadSpec], OpenContext]] = {
    "eagle3": _prepare_eagle3,
    "mtp": _prepare_mtp,
    "gemma4-assistant": _prepare_assistant,
    "dflash": _prepare_dflash,
    "dspark": _prepare_dflash,
}
"""Check a head's file, and return how it is opened. Raise Unsupported, InvalidModelFile."""


def open_head(
    target: LlamaModel,
    path: Path,
    spec: HeadSpec,
    progress: Callable[[float], None] = lambda fraction: None,
    check: CheckCancelled = lambda: None,
) -> LlamaHead:
    """Load the head in a GGUF file, perhaps the target's, which `spec` describes, for `target`.

    Raises Unsupported for a head that llama.cpp cannot run on this target, InvalidModelFile, Cancelled.
    """
    if spec.kind not in _KINDS:
        raise Unsupported(f"llama.cpp runs no heads of the kind '{spec.kind}'.", hint="Use --draft ngram, or another.")
    check_hidden_size(path.name, spec, target.hidden_size)
    spec = spec.complete(target.layer_count)
    open_context, weights = _KINDS[spec.kind](target, path, spec), target
    if not spec.in_target:
        options = replace(target.options.alone, mtp=spec.kind in _MTP_KINDS)
        weights = load(path, options, progress=progress, check=check, sees_gpus=not target.options.on_host)
        if weights.tokenizer.vocab_size != target.tokenizer.vocab_size:
            weights.close()
            raise Unsupported(f"{path.name} has another vocabulary than the model.", hint=OTHER_HEAD)
    return LlamaHead(spec, target, weights, open_context)
