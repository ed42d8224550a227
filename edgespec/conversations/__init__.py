"""Conversations in one SQLite file: each is a tree of turns, with search and export."""

from edgespec.conversations.database import Conversation, Role, Spans, Turn
from edgespec.conversations.export import from_json, to_json, to_markdown
from edgespec.conversations.search import SearchHit
from edgespec.conversations.store import Store

__all__ = ["Conversation", "Role", "SearchHit", "Spans", "Store", "Turn", "from_json", "to_json", "to_markdown"]
