"""/api/tags, /api/ps and /api/show: the models, as Ollama describes them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from hashlib import sha256
from typing import Any

from edgespec.server.fields import Body
from edgespec.server.model_slot import ModelSlot
from edgespec.server.models import Models
from edgespec.server.ollama_lines import format_time

API_VERSION = "0.12.0"
"""The version of Ollama whose interface this is: clients compare it."""
_LONG_S = 3e9  # about a century, for models that are not unloaded by themselves; clients need a date
_FORMATS = {"llamacpp": "gguf", "mlx": "safetensors"}


class ShowRequest(Body):
    """The body of /api/show. `name` is an older name of `model`."""

    model: str = ""
    name: str = ""


def list_tags(models: Models) -> dict[str, Any]:
    """Every model. Sizes of files are not known: they are 0."""
    modified = _format_created(models)
    return {"models": [{**_describe(slot), "modified_at": modified, "size": 0} for slot in models.slots.values()]}


def list_running(models: Models) -> dict[str, Any]:
    """The loaded models, with their bytes in memory."""
    running = []
    for slot in models.slots.values():
        if (model_info := slot.model_info) is None:
            continue
        fit = model_info.fit
        size = fit.needed if fit is not None else slot.resident
        expires = datetime.now(UTC) + timedelta(seconds=min(slot.unloads_in_s, _LONG_S))
        running.append({
            **_describe(slot),
            "size": size,
            "size_vram": size if fit is not None and fit.fits_on_devices else 0,
            "expires_at": format_time(expires),
            "context_length": model_info.context_size,
        })  # fmt: skip
    return {"models": running}


def show(models: Models, slot: ModelSlot) -> dict[str, Any]:
    """One model. Its chat template is known while it is loaded."""
    template = (slot.model_info.chat_template if slot.model_info is not None else None) or ""
    capabilities = ["completion", "tools", *(["thinking"] if "enable_thinking" in template else [])]
    # Clients read the context under the name of the architecture.
    described = {"general.architecture": "edgespec", "general.basename": slot.name}
    return {
        "modelfile": "",
        "parameters": "",
        "template": template,
        "details": _describe(slot)["details"],
        "model_info": {**described, "edgespec.context_length": slot.context_size},
        "capabilities": capabilities,
        "modified_at": _format_created(models),
    }


def _describe(slot: ModelSlot) -> dict[str, Any]:
    """The fields that every list has. The digest is one of the name."""
    name = slot.name if ":" in slot.name else f"{slot.name}:latest"
    backend = slot.model_info.backend if slot.model_info is not None else ""
    details = {
        "parent_model": "",
        "format": _FORMATS.get(backend, ""),
        "family": "",
        "families": None,
        "parameter_size": "",
        "quantization_level": "",
    }
    return {"name": name, "model": name, "digest": sha256(name.encode()).hexdigest(), "details": details}


def _format_created(models: Models) -> str:
    return format_time(datetime.fromtimestamp(models.created_s, UTC))
