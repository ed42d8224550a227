"""How a model writes calls: the texts around names and arguments, by which calls are forced and read."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

ID, INDEX, KEY, NAME, TYPE = "\ufdd0", "\ufdd1", "\ufdd2", "\ufdd3", "\ufdd4"
"""The signs: placeholders in the texts of a CallFormat, which are noncharacters of Unicode. They stand for the id of a
call, its number in the message, the key of an argument, the name of the tool, and the JSON type of a value.
"""

SIGNS = f"[{ID}{INDEX}{KEY}{NAME}{TYPE}]"


PYTHON_TAG = "<|python_tag|>"
"""Llama 3 may write it in front of calls that have no other mark; templates do not show it."""


@dataclass(frozen=True, slots=True)
class JsonArguments:
    """The arguments are one JSON object."""


@dataclass(frozen=True, slots=True)
class TaggedArguments:
    """Each argument stands between tags, its value without quotes. A value that is no string is JSON.

    key      text in front of a key
    string   text between a key and a string
    other    text between a key and another value; if both are equal, the tool's schema gives the types
    end      text behind a value
    between  text between two arguments
    empty    text between the name and the end of a call without arguments
    """

    key: str
    string: str
    other: str
    end: str
    between: str
    empty: str

    def mark(self, kind: str) -> str:
        """The text between a key and a value of a JSON type, as schemas name it."""
        if kind == "string":
            return self.string
        return self.other.replace(TYPE, "number" if kind == "integer" else kind)


@dataclass(frozen=True, slots=True)
class LiteralArguments:
    """Keys and values as in a programming language, such as city='Paris', days=3.

    assign  text between a key and its value
    quote   text on both sides of a string; keys have none
    comma   text between two arguments
    """

    assign: str
    quote: str
    comma: str


Arguments = JsonArguments | TaggedArguments | LiteralArguments


@dataclass(frozen=True)
class CallFormat:
    """The text of the calls of an answer: `address`, `first`, calls with `between` in between, `last`. A call is
    `before`, its name, `middle`, its arguments and `after`.

    address  text that leads to calls, as an answer's header leads to text for the user; readers do not see it
    between  None if an answer holds one call
    """

    first: str = ""
    before: str = ""
    middle: str = ""
    arguments: Arguments = JsonArguments()
    after: str = ""
    between: str | None = None
    last: str = ""
    address: str = ""

    @property
    def leads(self) -> tuple[str, str]:
        """The texts in front of all calls and in front of each name. The address leads to a block, or to each call."""
        if self.first:
            return self.address + self.first, self.before
        return "", self.address + self.before

    @cached_property
    def opening(self) -> str:
        """The mark at the beginning of calls; "" if they have none, such as JSON alone."""
        if first := self.first.split():
            lead = re.split(SIGNS, first[0])[0].rstrip("[") or "["
        else:
            lead = re.split(SIGNS, self.before.strip())[0]
        if (bracket := re.match(r"\[\w+\]", lead)) is not None:
            return bracket[0]
        if self.first.strip():
            return lead.strip("[")
        if ">" in (mark := re.split('[{"]', lead)[0]):
            return mark[: mark.rindex(">") + 1]
        if (attribute := re.match(r'<[\w:]+ \w+="', lead)) is not None:
            return attribute[0]
        return mark.strip().strip("[")

    @property
    def is_marked(self) -> bool:
        """Whether every call begins with `opening`, and nothing else does."""
        return bool(self.opening) and not self.address

    @cached_property
    def closing(self) -> str:
        """The mark behind calls; "" if they go on to the end of the answer."""
        if (found := re.search(r"<.*|`{3}", self.last.strip(), re.DOTALL)) is not None:
            return found[0]
        found = re.search(r"<[^<]*$", self.after.strip())
        return found[0] if found is not None and not self.first.strip() else ""

    @cached_property
    def keys(self) -> tuple[str, str] | None:
        """The keys of name and arguments if a call is one JSON object."""
        name = re.search(r'"(\w+)":\s*"$', self.before)
        arguments = re.match(r'",\s*"(\w+)":\s*$', self.middle)
        return (name[1], arguments[1]) if name and arguments else None

    @cached_property
    def visible(self) -> tuple[str, ...]:
        """Texts whose control tokens count as text of an answer."""
        texts = [self.first, self.before, self.middle, self.after, self.between or "", self.last]
        texts += [] if self.opening else [PYTHON_TAG]
        match self.arguments:
            case TaggedArguments() as tags:
                texts += [tags.key, tags.string, tags.other, tags.end, tags.between, tags.empty]
            case LiteralArguments() as literals:
                texts += [literals.assign, literals.quote, literals.comma]
        pieces = (piece for text in texts for piece in re.split(SIGNS, text))
        return tuple(dict.fromkeys(filter(None, pieces)))

    @property
    def in_blocks(self) -> bool:
        """Whether several calls stand between one `opening` and one `closing`."""
        return self.between is not None and bool(self.first.strip())


def loosen(text: str, *, captures_id: bool = False) -> str:
    """A regular expression of `text` in which blanks are optional, and signs stand for what they mean."""
    meanings = {
        ID: r"(?P<id>[\w.:-]*)" if captures_id else r"[\w.:-]*",
        INDEX: r"\d+",
        KEY: r"[^\s<>]+?",
        NAME: r"[\w.:/-]+?",
        TYPE: r"\w+",
    }
    words = re.split(rf"(\s+|{SIGNS})", text)
    return "".join(r"\s*" if each.isspace() else meanings.get(each) or re.escape(each) for each in words)
