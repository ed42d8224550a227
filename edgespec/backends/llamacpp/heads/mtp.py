"""MTP layers on llama.cpp (GGUF `nextn`), which draft from the target's last hidden state, after its norm.

They lie in the target's own file, behind the layers of the target, or in a file of their own, with copies of the
embeddings and the output matrix. llama.cpp runs one in a context of its own, whose rows are a token and the state of
the token before. A pair has the position of that state; rotary positions are relative.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from edgespec.backends.attached_draft import OTHER_HEAD, Unsupported
from edgespec.backends.llamacpp.abi import MTP_CHAINS, MTP_TENSORS
from edgespec.backends.llamacpp.heads.checks import OpenContext, require
from edgespec.backends.llamacpp.heads.contexts import ChainContext, HeadContext
from edgespec.backends.llamacpp.model import LlamaModel
from edgespec.backends.llamacpp.rewrite import count_blocks
from edgespec.formats.gguf import Header, join_parts
from edgespec.formats.gguf_validate import read_file
from edgespec.formats.heads import HeadSpec

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
