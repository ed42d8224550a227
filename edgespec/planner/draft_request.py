"""What a value of --draft asks for: drafters of the registry by name, and models by reference."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from edgespec.backends.attached_draft import SelfDraftSpec, parse
from edgespec.drafters import SELF, DrafterSpec, drafter_specs, find_spec
from edgespec.errors import InvalidRequest, UnknownModel

AUTO, NONE = "auto", "none"
_OPTIONS = {"layerskip": "[:K]", "qspec": "[:BITS]", "sparse": "[:SINK,WINDOW]"}
_SHORT_FORMS = ("skip", "https")  # accepted, but not listed
_HEADS = "trained heads of the target"


@dataclass(frozen=True, slots=True)
class DraftTerm:
    """One drafter that was asked for.

    reference   of a model to load; None for the one that the registry pairs with the target
    self_draft  how the target drafts for itself
    """

    spec: DrafterSpec
    reference: str | None = None
    self_draft: SelfDraftSpec | None = None


def parse_draft(text: str) -> list[DraftTerm]:
    """The drafters that `text` names, joined by '+': 'ngram+model', 'ngram+./draft.gguf', 'layerskip:4+qspec'.

    Methods of self-drafting together make one drafter. Whatever names no drafter is a reference to a draft model. Not
    for 'auto'. Raises InvalidRequest.
    """
    if text == NONE:
        return []
    parts = _split(text)
    terms: dict[str, DraftTerm] = {}
    methods = [part for part in parts if _find_name(part) == SELF]
    words = [part.partition(":")[0] for part in parts]
    if twice := next((word for word in words if find_spec(word) and words.count(word) > 1), None):
        raise InvalidRequest(f"--draft {text} names '{twice}' twice.", hint="Name it once.")
    for part in parts:
        word, colon, rest = part.partition(":")
        spec = find_spec(word)
        if spec is None:
            term = DraftTerm(drafter_specs()["model"], part)
        elif spec.name == SELF:
            term = DraftTerm(spec, self_draft=parse("+".join(methods)))
        elif spec.needs == "server":
            term = DraftTerm(spec, part)
        elif colon and spec.needs not in ("model", "head"):
            raise InvalidRequest(f"the drafter '{word}' takes no options.", hint=f"Use --draft {word}.")
        else:
            term = DraftTerm(spec, rest if colon else None)
        if term.spec.name != SELF and term.spec.name in terms:
            raise InvalidRequest(f"--draft {text} names two draft models.", hint="Name one.")
        terms[term.spec.name] = term
    return list(terms.values())


def list_words() -> list[tuple[str, DrafterSpec]]:
    """What names a drafter in --draft, without its options."""
    return [(w, spec) for spec in drafter_specs().values() for w in spec.all_words if w not in _SHORT_FORMS]


def describe_words() -> str:
    """One line for a user who chooses: what --draft takes."""
    words = [f"{words} ({_HEADS})" if summary == _HEADS else words for words, summary in list_groups()]
    return f"{', '.join([AUTO, NONE, *words])}, or a model; join them with '+'"


def list_groups() -> list[tuple[str, str]]:
    """The words of each drafter with their options, and its summary; trained heads are one group."""
    groups: dict[str, list[str]] = {}
    for word, spec in list_words():
        groups.setdefault(_HEADS if spec.needs == "head" else spec.summary, []).append(format_word(word, spec))
    return [(", ".join(words), summary) for summary, words in groups.items()]


def format_word(word: str, spec: DrafterSpec) -> str:
    """`word` with the options that it takes: 'pard[:REF]'."""
    if spec.needs == "server":
        return f"{word}://HOST:PORT"
    return word + ("[:REF]" if spec.needs in ("model", "head") else _OPTIONS.get(word, ""))


@contextmanager
def naming_drafters(reference: str | None) -> Iterator[None]:
    """Where `reference` turns out to name no model, list the drafters too: the user may have mistyped one."""
    try:
        yield
    except UnknownModel as error:
        if reference is None or "/" in reference or reference.lower().endswith(".gguf"):
            raise
        words = [word for word, _ in list_words()]
        near = difflib.get_close_matches(reference.partition(":")[0], [*words, AUTO, NONE], n=1)
        if reference == SELF:
            near = [" or ".join(word for word, spec in list_words() if spec.name == SELF)]
        start = f"Did you mean --draft {near[0]}? " if near else ""
        listed = ", ".join(words)
        raise UnknownModel(
            error.message, hint=f"{start}Drafters: {listed}. `edgespec list` shows the models."
        ) from None


def _split(text: str) -> list[str]:
    """The parts between '+' signs. One that names no drafter continues a draft model's path, which may contain '+'.

    Raises InvalidRequest.
    """
    parts: list[str] = []
    for part in text.split("+"):
        if parts and _find_name(part) is None and _names_model(parts[-1]):
            parts[-1] += f"+{part}"
        else:
            parts.append(part)
    if len(parts) > 1 and (AUTO in parts or NONE in parts):
        word = AUTO if AUTO in parts else NONE
        raise InvalidRequest(f"'{word}' cannot be joined with other drafters.", hint="Name them: --draft ngram+model.")
    if "" in parts:
        raise InvalidRequest(f"--draft '{text}' leaves a drafter out.", hint="Name drafters as in ngram+model.")
    return parts


def _find_name(part: str) -> str | None:
    """The drafter that `part` names, with or without options."""
    spec = find_spec(part.partition(":")[0])
    return spec.name if spec is not None else None


def _names_model(part: str) -> bool:
    """Whether `part` is a reference to a draft model, 'model:' before it or not, or names a server's draft."""
    return _find_name(part) is None or part.startswith("model:") or "/" in part.partition("://")[2]
