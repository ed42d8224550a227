"""Heads whose file has one layer of the target's kind: MTP, and the assistants of Gemma 4."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from edgespec.backends.attached_draft import OTHER_HEAD, Unsupported
from edgespec.backends.llamacpp.abi import MTP_CHAINS, MTP_TENSORS
from edgespec.backends.llamacpp.heads.checks import OpenContext, require
from edgespec.backends.llamacpp.heads.contexts import AssistantContext, ChainContext, HeadContext
from edgespec.backends.llamacpp.model import LlamaModel
from edgespec.backends.llamacpp.rewrite import count_blocks
from edgespec.formats.gguf import Header, join_parts
from edgespec.formats.gguf_validate import read_file
from edgespec.formats.heads import HeadSpec

# MTP layers on llama.cpp (GGUF `nextn`): they draft from the target's last hidden state, after its norm.
#
# They lie in the target's own file, behind the layers of the target, or in a file of their own, with copies of the
# embeddings and the output matrix. llama.cpp runs one in a context of its own, whose rows are a token and the state of
# the token before. A pair has the position of that state; rotary positions are relative.

_ALWAYS = ("nextn.eh_proj", "nextn.enorm", "nextn.hnorm")
_SAME_SHAPE = (
    *("embedding_length", "attention.key_length", "attention.value_length", "rope.dimension_count"),
    *("attention.key_length_mla", "attention.value_length_mla"),
)


def prepare_mtp(target: LlamaModel, path: Path, spec: HeadSpec) -> OpenContext:
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
    """The number of MTP layers. Raises Unsupported, InvalidModelFile if llama.cpp would abort the process."""
    architecture = header.architecture
    if architecture not in MTP_TENSORS:
        raise Unsupported(f"llama.cpp runs no MTP layers of '{architecture}' models.", hint="Use --draft auto.")
    count, blocks = header.own("nextn_predict_layers") or 0, header.own("block_count") or 0
    if count > 1 and architecture not in MTP_CHAINS:
        raise Unsupported(
            f"{path.name} has {count} MTP layers; llama.cpp runs one for '{architecture}'.", hint="Use --draft auto."
        )
    require(header, 0 < count < blocks, f"{count} of its {blocks} layers are MTP layers")
    held = {tensor.name for tensor in header.tensors}
    for block in range(blocks - count, blocks):
        for name in (*_ALWAYS, *MTP_TENSORS[architecture]):
            require(header, f"blk.{block}.{name}.weight" in held, f"its MTP layer lacks {name}")
    if header.metadata.get(f"{architecture}.attention.temperature_scale"):
        raise Unsupported("llama.cpp runs no MTP layers with a temperature of attention.", hint="Use --draft auto.")
    return count


# Gemma 4 assistants on llama.cpp: a few layers that draft with the target's own keys and values.
#
# Their layers have queries alone, and attend to what the target's last two layers hold: those with a window to the last
# but one, the others to the last. A row is a token and the hidden state before it, as for an MTP layer; every drafted
# token has the position of the root, since the cache ends there.


_SAME = ("key_length", "value_length", "key_length_swa", "value_length_swa", "sliding_window")  # of attention


def prepare_assistant(target: LlamaModel, path: Path, spec: HeadSpec) -> OpenContext:
    header, whole = read_file(path), read_file(target.path)
    is_whole = header.own("nextn_predict_layers") == header.own("block_count")
    require(header, is_whole, "not all of its layers are the assistant's")
    has_size = header.own("embedding_length_out") != header.own("embedding_length")
    require(header, has_size, "its embedding_length_out is not the target's hidden size")
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
