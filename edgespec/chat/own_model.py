"""The model that a conversation was held with, as it is stored with each answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Self, cast

from edgespec.chat.conversation import Conversation, Turn
from edgespec.engine.model_info import ModelInfo
from edgespec.models.load_config import LoadConfig
from edgespec.models.references import LocalPath, parse_reference

if TYPE_CHECKING:
    from edgespec.backends import BackendName

_KEY = "opened"  # in the settings of an answer


@dataclass(frozen=True, slots=True)
class OwnModel:
    """What was asked for when the model was opened.

    reference  None: the registry's default
    draft      as `--draft` takes it
    backend    None: the best for the machine
    """

    reference: str | None
    draft: str = "auto"
    backend: BackendName | None = None

    def to_settings(self) -> dict[str, Any]:
        """The part of an answer's settings that `find` reads."""
        return {_KEY: asdict(self)}

    @classmethod
    def of(cls, request: LoadConfig) -> Self:
        """What opens the model of `request` again, from any folder."""
        reference = request.model
        if reference is not None and request.backend != "toy":
            parsed = parse_reference(reference)
            reference = str(parsed.path.resolve()) if isinstance(parsed, LocalPath) else reference
        return cls(reference, request.draft, request.backend)

    @classmethod
    def find(cls, conversation: Conversation, turns: Sequence[Turn]) -> Self:
        """The model of the last answer among `turns`; the conversation's model, by its name, if no answer tells it."""
        for turn in reversed(turns):
            match turn.settings.get(_KEY) if isinstance(turn.settings, Mapping) else None:
                case {"reference": str() | None as reference, "draft": str(draft), "backend": str() | None as backend}:
                    named = reference or (turn.settings.get("model") if backend is None else None)
                    return cls(named, draft, cast("BackendName | None", backend))
        return cls(conversation.model)


def answer_settings(request: LoadConfig, model_info: ModelInfo) -> dict[str, Any]:
    """The settings to store with an answer of the model that `request` has opened."""
    return {"model": model_info.name, "draft": model_info.draft, **OwnModel.of(request).to_settings()}
