"""Local language models with exact speculative decoding: `edgespec.load`, and the types that it works with.

Importing this package imports neither numpy nor a runtime: each name below is imported on its first use (PEP 562).
"""

from __future__ import annotations

__version__ = "0.2.0"

TYPE_CHECKING = False  # importing typing takes as long as starting Python
if TYPE_CHECKING:
    from edgespec.api.model import AsyncModel, Model, load, load_async
    from edgespec.api.options import GenerationArguments, LoadArguments
    from edgespec.api.reply import AsyncReplyStream, Reply, ReplyStream
    from edgespec.core.metrics import Metrics
    from edgespec.engine.model_info import ModelInfo
    from edgespec.errors import (
        BackendError,
        BackendUnavailable,
        CacheError,
        ContextOverflow,
        DoesNotFit,
        DraftRefused,
        EdgespecError,
        HubError,
        InvalidModelFile,
        InvalidRequest,
        PromptTooLong,
        RegistryError,
        RollbackError,
        TemplateError,
        UnknownModel,
    )
    from edgespec.progress import Reporter
    from edgespec.text.chat_template import Message
    from edgespec.text.stream import Piece
    from edgespec.text.tool_calls import ToolCall
else:
    _MODULES = {  # of all but errors
        "edgespec.api.model": ("AsyncModel", "AsyncReplyStream", "Model", "Reply", "ReplyStream", "load", "load_async"),
        "edgespec.api.options": ("GenerationArguments", "LoadArguments"),
        "edgespec.core.metrics": ("Metrics",),
        "edgespec.progress": ("Reporter",),
        "edgespec.client.client": ("ModelInfo",),
        "edgespec.text.chat_template": ("Message",),
        "edgespec.text.stream": ("Piece",),
        "edgespec.text.tool_calls": ("ToolCall",),
    }
    _HOMES = {name: module for module, names in _MODULES.items() for name in names}

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module 'edgespec' has no attribute '{name}'")
        from importlib import import_module

        value = getattr(import_module(_HOMES.get(name, "edgespec.errors")), name)
        globals()[name] = value  # found without this function from now on
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


__all__ = [
    "AsyncModel",
    "AsyncReplyStream",
    "BackendError",
    "BackendUnavailable",
    "CacheError",
    "ContextOverflow",
    "DoesNotFit",
    "DraftRefused",
    "EdgespecError",
    "GenerationArguments",
    "HubError",
    "InvalidModelFile",
    "InvalidRequest",
    "LoadArguments",
    "Message",
    "Metrics",
    "Model",
    "ModelInfo",
    "Piece",
    "PromptTooLong",
    "RegistryError",
    "Reply",
    "ReplyStream",
    "Reporter",
    "RollbackError",
    "TemplateError",
    "ToolCall",
    "UnknownModel",
    "__version__",
    "load",
    "load_async",
]
