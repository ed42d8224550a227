"""`edgespec show`: describe a model before it is downloaded."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.completers import complete_model
from edgespec.cli.options import backend_option, parse_backend

if TYPE_CHECKING:
    from edgespec.formats.gguf import Header
    from edgespec.formats.mlx_folder import Folder


@click.command("show")
@click.argument("model", metavar="[REF]", required=False, shell_complete=complete_model)
@click.option(
    "--ctx", type=click.IntRange(8), help="Context size for the memory estimate. [default: the model's, at most 8192]"
)
@backend_option("Runtime whose model an alias stands for.")
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout.")
def show_command(model: str | None, ctx: int | None, backend: str, as_json: bool) -> None:
    """Show a model's architecture, size, memory and draft. Reads only the header if it is not downloaded."""
    from edgespec.backends.options import LoadOptions
    from edgespec.conversations.adapted import adapted_folder
    from edgespec.formats.mlx_folder import Folder
    from edgespec.hub.hub import Hub
    from edgespec.planner.adapted import find_version
    from edgespec.planner.heads import find_head
    from edgespec.planner.memory import estimate_memory
    from edgespec.planner.plan import LoadConfig, choose_backend
    from edgespec.registry.resolve import read_metadata, resolve_pair
    from edgespec.registry.schema import load_registry
    from edgespec.units import gib

    hub, registry = Hub.from_environment(), load_registry()
    chosen = choose_backend(LoadConfig(model, parse_backend(backend)), registry, hub)
    resolved = resolve_pair(model, chosen, registry, hub)
    found = read_metadata(resolved.target, hub)
    own = find_head(found)
    version = find_version(resolved, chosen, adapted_folder(), registry, hub)
    context = LoadOptions(ctx).context_for(found.trained_context)
    cost = estimate_memory(found, context)
    facts: dict[str, Any] = {
        "name": resolved.name,
        "backend": chosen,
        **(_describe_folder(found) if isinstance(found, Folder) else _describe_gguf(found)),
        "draft": None if resolved.draft is None else str(resolved.draft),
        **({"adapted_draft": version} if version is not None else {}),
        **({"pard": str(resolved.pard)} if resolved.pard is not None else {}),
        **({"head": str(resolved.head)} if resolved.head is not None else {}),
        **({"own_head": own.kind} if own is not None and own.in_target else {}),
        "context": context,
        "weights_bytes": cost.weights,
        "kv_bytes": cost.kv,
        "memory_bytes": cost.total,
    }
    if as_json:
        click.echo(json.dumps(facts, ensure_ascii=False))
        return
    for key, value in facts.items():
        if key.endswith("_bytes"):
            shown = gib(value)
        elif isinstance(value, bool):
            shown = "yes" if value else "no"
        elif isinstance(value, int):
            shown = f"{value:,}"
        elif value is None:
            shown = "n-grams" if key == "draft" else "not stated"
        else:
            shown = str(value)
        click.echo(f"{key.removesuffix('_bytes').replace('_', ' '):16} {shown}")


def _describe_gguf(header: Header) -> dict[str, Any]:
    return {
        "file": header.name,
        "architecture": header.architecture,
        "parameters": sum(math.prod(tensor.shape) for tensor in header.tensors),
        "layers": header.own("block_count"),
        "embedding": header.own("embedding_length"),
        "trained_context": header.trained_context,
        "vocabulary": _count_items(header, "tokenizer.ggml.tokens"),
        "tensor_types": _format_tensor_types(header),
        "chat_template": "tokenizer.chat_template" in header.metadata,
    }


def _describe_folder(folder: Folder) -> dict[str, Any]:
    from edgespec.text.chat_template import read_template

    return {
        "file": folder.name,
        "architecture": folder.config.get("model_type", "none"),
        "layers": folder.integer("num_hidden_layers"),
        "embedding": folder.integer("hidden_size"),
        "trained_context": folder.trained_context,
        "vocabulary": folder.integer("vocab_size"),
        "quantization": folder.quantization,
        "chat_template": read_template(folder.path) is not None,
    }


def _count_items(header: Header, key: str) -> int:
    value = header.metadata.get(key)
    return len(value) if isinstance(value, list) else 0


def _format_tensor_types(header: Header) -> str:
    """Tensor types by share of the weights' bytes, such as 'Q4_K 85%, Q6_K 14%'."""
    sizes: dict[str, int] = {}
    for tensor in header.tensors:
        sizes[tensor.type.name] = sizes.get(tensor.type.name, 0) + tensor.nbytes
    ranked = sorted(sizes.items(), key=lambda item: -item[1])
    return ", ".join(
        f"{name} {size / header.weight_bytes:.0%}" for name, size in ranked if size * 100 > header.weight_bytes
    )
