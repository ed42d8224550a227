"""Conversations in one SQLite file: each is a tree of turns, with search and export."""

from edgespec.conversations.database import Conversation, Role, SearchHit, Spans, Turn
from edgespec.conversations.store import Store, from_json, to_json, to_markdown

__all__ = ["Conversation", "Role", "SearchHit", "Spans", "Store", "Turn", "from_json", "to_json", "to_markdown"]
