"""Conversations in one SQLite file: each is a tree of turns, with search and export."""

from edgespec.chat.conversation import Conversation, Role, Spans, Turn
from edgespec.chat.export import from_json, to_json, to_markdown
from edgespec.chat.search import SearchHit
from edgespec.chat.store import Store

__all__ = ["Conversation", "Role", "SearchHit", "Spans", "Store", "Turn", "from_json", "to_json", "to_markdown"]
