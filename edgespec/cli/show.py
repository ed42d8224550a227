"""`edgespec show`: describe a model before it is downloaded."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.models import backend_option
from edgespec.cli.options import json_option, model_argument, offer, open_hub, parse_backend
from edgespec.cli.output import print_result
from edgespec.options import OPTIONS

if TYPE_CHECKING:
    from edgespec.formats.gguf import Header
    from edgespec.formats.mlx_folder import Folder


@click.command("show")
@model_argument
@offer(OPTIONS["ctx"], help="Context size for the memory estimate. [default: the model's, at most 8192]")
@backend_option
@json_option
def show_command(model: str | None, ctx: int | None, backend: str, as_json: bool) -> None:
    """Show a model's architecture, size, memory and draft. Reads only the header if it is not downloaded."""
    from edgespec.backends.options import LoadOptions
    from edgespec.cli.facts import format_facts
    from edgespec.formats.mlx_folder import Folder
    from edgespec.models.fit import estimate_memory
    from edgespec.models.heads import find_head
    from edgespec.models.load_config import LoadConfig
    from edgespec.models.resolve import read_metadata, resolve_pair
    from edgespec.models.target import choose_backend

    registry, hub = open_hub()
    chosen = choose_backend(LoadConfig(model, parse_backend(backend)), registry, hub)
    resolved = resolve_pair(model, chosen, registry, hub)
    found = read_metadata(resolved.target, hub)
    own = find_head(found)
    drafters = {
        "pard": resolved.models.pard and str(resolved.models.pard),
        "head": resolved.models.head and str(resolved.models.head),
        "own_head": own.kind if own is not None and own.in_target else None,
    }
    context = LoadOptions(ctx).context_for(found.trained_context)
    cost = estimate_memory(found, context)
    facts: dict[str, Any] = {
        "name": resolved.name,
        "backend": chosen,
        **(_describe_folder(found) if isinstance(found, Folder) else _describe_gguf(found)),
        "draft": None if resolved.models.draft is None else str(resolved.models.draft),
        **{name: value for name, value in drafters.items() if value is not None},
        "context": context,
        "weights_bytes": cost.weights,
        "kv_bytes": cost.kv,
        "memory_bytes": cost.total,
    }
    print_result(facts, format_facts(facts), as_json=as_json)


def _describe_gguf(header: Header) -> dict[str, Any]:
    from edgespec.models.resolve import find_template

    return {
        "file": header.name,
        "architecture": header.architecture,
        "parameters": sum(math.prod(tensor.shape) for tensor in header.tensors),
        "layers": header.own("block_count"),
        "embedding": header.own("embedding_length"),
        "trained_context": header.trained_context,
        "vocabulary": len(header.tokens),
        "tensor_types": _format_tensor_types(header),
        "chat_template": _describe_template(find_template(header)),
    }


def _describe_folder(folder: Folder) -> dict[str, Any]:
    from edgespec.models.resolve import find_template

    return {
        "file": folder.name,
        "architecture": folder.config.get("model_type", "none"),
        "layers": folder.integer("num_hidden_layers"),
        "embedding": folder.integer("hidden_size"),
        "trained_context": folder.trained_context,
        "vocabulary": folder.integer("vocab_size"),
        "quantization": folder.quantization,
        "chat_template": _describe_template(find_template(folder)),
    }


def _describe_template(source: str | None) -> dict[str, str] | None:
    """What a chat template shows of conversations, and how its model writes calls; None without one."""
    from edgespec.text.chat_template import profile_template

    return profile_template(source).describe() if source is not None else None


def _format_tensor_types(header: Header) -> str:
    """Tensor types by share of the weights' bytes, such as 'Q4_K 85%, Q6_K 14%'."""
    sizes: dict[str, int] = {}
    for tensor in header.tensors:
        sizes[tensor.type.name] = sizes.get(tensor.type.name, 0) + tensor.nbytes
    ranked = sorted(sizes.items(), key=lambda item: -item[1])
    return ", ".join(
        f"{name} {size / header.weight_bytes:.0%}" for name, size in ranked if size * 100 > header.weight_bytes
    )
