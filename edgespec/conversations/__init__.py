"""Conversations kept between runs: a tree of turns each, in one SQLite file, with search and export."""

from edgespec.conversations.export import from_json, to_json, to_markdown
from edgespec.conversations.model import Conversation, Role, Spans, Turn
from edgespec.conversations.search import SearchHit
from edgespec.conversations.store import Store

__all__ = ["Conversation", "Role", "SearchHit", "Spans", "Store", "Turn", "from_json", "to_json", "to_markdown"]
