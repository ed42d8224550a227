"""The place in which a chat is held, a full screen or a terminal's lines, as the commands need it."""

from __future__ import annotations

from typing import Protocol

from edgespec.chat.recorder import ConversationRecorder
from edgespec.chat.state import Chat
from edgespec.client.client import EngineClient
from edgespec.engine.model_info import ModelInfo
from edgespec.models.load_config import LoadConfig


class Room(Protocol):
    """`request` is what the model was opened with. A command has changed `chat` or `recorder` when it calls these."""

    request: LoadConfig
    chat: Chat
    recorder: ConversationRecorder
    client: EngineClient

    def require_idle(self) -> None:
        """Raises NotReady while the model is loaded or answers."""

    def require_model(self) -> ModelInfo:
        """The open model. Raises NotReady if there is none; lines on a terminal open it again."""

    async def tell(self, *parts: str) -> None:
        """Show what the command has found or done."""

    async def show_help(self) -> None: ...

    async def show_stats(self) -> None:
        """Show the statistics of the last answer. Raises InvalidRequest if there is none."""

    async def show_turns(self) -> None:
        """Draw the messages again, since they are others than before."""

    async def show_conversation(self) -> None:
        """Draw a stored conversation, which is continued from now on."""

    def show_rewound(self, number: int, *, keep_question: bool) -> None:
        """Take question `number` and what follows it off the screen; with `keep_question` only what follows it."""

    async def answer_question(self) -> None:
        """Answer the last question. Raises ContextOverflow, InvalidRequest if no model is open."""

    async def continue_answer(self) -> None:
        """Go on with the last answer. Raises InvalidRequest if it is whole, ContextOverflow."""

    def put_back(self, text: str) -> None:
        """Let the user change a message and send it again."""

    def attach(self, name: str, text: str) -> None:
        """Add a text to the message that the user writes."""

    async def choose_model(self) -> None:
        """List models, of which the user opens one."""

    async def open_model(self, request: LoadConfig) -> None:
        """Open another model; the conversation stays."""

    async def change_draft(self, request: LoadConfig) -> None: ...

    async def speculate(self, argument: str) -> ModelInfo:
        """Change how the model drafts, as Engine.change_speculation does."""

    async def leave(self) -> None:
        """End the chat."""
