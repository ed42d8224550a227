"""Gemma 4 assistants on llama.cpp, a few layers that draft with the target's own keys and values.

Their layers have queries alone, and attend to what the target's last two layers hold: those with a window to the last
but one, the others to the last. A row is a token and the hidden state before it, as for an MTP layer; every drafted
token has the position of the root, since the cache ends there.
"""

from __future__ import annotations

from pathlib import Path

from edgespec.backends.attached_draft import OTHER_HEAD, Unsupported
from edgespec.backends.llamacpp.heads.checks import OpenContext, require
from edgespec.backends.llamacpp.heads.contexts import AssistantContext
from edgespec.backends.llamacpp.model import LlamaModel
from edgespec.formats.gguf import Header
from edgespec.formats.gguf_validate import read_file
from edgespec.formats.heads import HeadSpec

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
