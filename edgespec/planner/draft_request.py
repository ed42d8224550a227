"""What a value of --draft asks for: drafters of the registry by name, and models by reference."""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.backends.attached_draft import SelfDraftSpec, parse
from edgespec.drafters import SELF, DrafterSpec, drafter_specs, find_spec
from edgespec.errors import InvalidRequest

AUTO, NONE = "auto", "none"


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
    parts = text.split("+")
    if not any(find_spec(part.partition(":")[0]) for part in parts):
        return [DraftTerm(drafter_specs()["model"], text)]  # a path may contain '+'
    terms: dict[str, DraftTerm] = {}
    methods = [part for part in parts if _names(part, SELF)]
    for part in parts:
        word, colon, rest = part.partition(":")
        spec = find_spec(word)
        if spec is not None and spec.name == SELF:
            term = DraftTerm(spec, self_draft=parse("+".join(methods)))
        elif spec is None:
            term = DraftTerm(drafter_specs()["model"], part)
        elif colon and spec.needs != "model":
            raise InvalidRequest(f"the drafter '{word}' takes no '{rest}'.", hint=f"Use --draft {word}.")
        else:
            term = DraftTerm(spec, rest if colon else None)
        if term.spec.name != SELF and term.spec.name in terms:
            raise InvalidRequest(f"--draft {text} names two drafts for '{term.spec.name}'.", hint="Name one.")
        terms[term.spec.name] = term
    return list(terms.values())


def _names(part: str, drafter: str) -> bool:
    spec = find_spec(part.partition(":")[0])
    return spec is not None and spec.name == drafter
