"""/api/tags, /api/ps, /api/show, /api/pull and /api/delete: the models, as Ollama describes them."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from typing import Any

from pydantic import AliasChoices, Field

from edgespec.errors import InvalidRequest
from edgespec.hub.reference import Alias, HubFile, HubQuant, HubRepo, parse_reference
from edgespec.planner.plan import LoadConfig
from edgespec.server.downloads import Progress
from edgespec.server.fields import Body
from edgespec.server.model_slot import ModelSlot
from edgespec.server.models import TAG, AnySlot, Models, require_local
from edgespec.server.ollama_lines import format_line, format_time
from edgespec.text.reasoning import detect_format

API_VERSION = "0.12.0"
"""The version of Ollama whose interface this is: clients compare it."""
_OLLAMAS_HUB = "hf.co/"  # before the name of a repository
_LONG_S = 3e9  # about a century, for models that are not unloaded by themselves; clients need a date
_FORMATS = {"llamacpp": "gguf", "mlx": "safetensors"}


class ShowRequest(Body):
    """The body of /api/show. `name` is an older name of `model`."""

    model: str = ""
    name: str = ""


class DeleteRequest(Body):
    """The body of /api/delete. `name` is an older name of `model`."""

    model: str = Field(default="", validation_alias=AliasChoices("model", "name"), max_length=512)

    def config(self, models: Models) -> LoadConfig:
        """What is meant: a model of the server with its drafts, or what a reference names; no file of this machine.

        Raises InvalidRequest, UnknownModel.
        """
        if (slot := models.look_up(self.model)) is not None:
            return require_local(slot).config
        if not self.model:
            raise InvalidRequest("the request names no model.", hint="Send a model.")
        name = self.model.removeprefix(_OLLAMAS_HUB).removesuffix(TAG)
        if not isinstance(parse_reference(name), Alias | HubRepo | HubQuant | HubFile):
            raise InvalidRequest(f"{self.model} is not a model of the hub.", hint="Name an alias or user/repo:QUANT.")
        return LoadConfig(name)


class PullRequest(DeleteRequest):
    """The body of /api/pull."""

    stream: bool = True


async def format_progress(
    models: Models, name: str, progress: AsyncGenerator[Progress, None]
) -> AsyncGenerator[bytes, None]:
    """The lines of a download."""
    async with aclosing(progress):
        async for each in progress:
            digest = sha256(each.file.encode()).hexdigest()
            sizes = {"total": each.total, "completed": each.done}
            yield format_line({"status": f"pulling {each.file}", "digest": f"sha256:{digest}", **sizes})
    yield format_line(describe_success(models, name))


def describe_success(models: Models, name: str) -> dict[str, Any]:
    """The last line of a download."""
    done: dict[str, Any] = {"status": "success"}
    if models.look_up(name) is None:
        done["warnings"] = [f"'{name}' is downloaded, but this server was not started with it."]
    return done


def list_tags(models: Models) -> dict[str, Any]:
    """Every model. Sizes of files are not known: they are 0."""
    modified = _format_created(models)
    return {"models": [{**_describe(slot), "modified_at": modified, "size": 0} for slot in models.all]}


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


def show(models: Models, slot: AnySlot) -> dict[str, Any]:
    """One model. Its chat template is known while it is loaded."""
    model_info = slot.model_info if isinstance(slot, ModelSlot) else None
    template = (model_info.chat_template if model_info is not None else None) or ""
    capabilities = ["completion", "tools", *(["thinking"] if detect_format(template) is not None else [])]
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


def _describe(slot: AnySlot) -> dict[str, Any]:
    """The fields that every list has. The digest is one of the name."""
    name = slot.name if ":" in slot.name else f"{slot.name}:latest"
    model_info = slot.model_info if isinstance(slot, ModelSlot) else None
    backend = model_info.backend if model_info is not None else ""
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
