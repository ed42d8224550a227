"""The values of --draft: drafters of the registry by name, and models by reference."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from edgespec.backends.attached_draft import parse
from edgespec.drafters.registry import SELF, DrafterSpec, drafter_specs, find_spec
from edgespec.errors import InvalidRequest, UnknownModel
from edgespec.models.drafts import DrafterPlan

AUTO, NONE = "auto", "none"
TRAINED = ("model", "mtp", "eagle", "eagle3")
"""The drafters that `edgespec adapt` can train, as `auto` chooses among those of a target."""
_OPTIONS = {"layerskip": "[:K]", "qspec": "[:BITS]", "sparse": "[:SINK,WINDOW]", "lookahead": "[:W,N,G]"}
_SHORT_FORM = "skip"  # accepted, but not listed


def parse_draft(text: str) -> list[DrafterPlan]:
    """The drafters that `text` names, joined by '+': 'ngram+model', 'ngram+./draft.gguf', 'layerskip:4+qspec'.

    Self-drafting methods combine into one drafter. A part that names no drafter refers to a draft model. Do not pass
    'auto'. Raises InvalidRequest.
    """
    if text == NONE:
        return []
    parts = _split(text)
    methods = [part for part in parts if _find_name(part) == SELF]
    terms: dict[str, DrafterPlan] = {}
    for part in parts:
        word, colon, rest = part.partition(":")
        spec = find_spec(word)
        if spec is None:
            term = DrafterPlan(drafter_specs()["model"], part)
        elif spec.name == SELF:
            term = DrafterPlan(spec, self_draft=parse("+".join(methods)))
        elif colon and spec.configure is not None:
            term = DrafterPlan(replace(spec, open=spec.configure(rest)))
        elif colon and spec.needs not in ("model", "head"):
            raise InvalidRequest(f"the drafter '{word}' takes no options.", hint=f"Write {word} alone.")
        else:
            term = DrafterPlan(spec, rest if colon else None)
        key = word if term.spec.name == SELF else term.spec.name
        if key in terms:
            raise InvalidRequest(f"the draft '{text}' names '{key}' twice.", hint="Name it once.")
        terms[key] = term
    return list({term.spec.name: term for term in terms.values()}.values())


def list_words() -> list[tuple[str, DrafterSpec]]:
    """The words of --draft, without options, and the drafter that each names."""
    return [(w, spec) for spec in drafter_specs().values() for w in spec.all_words if w != _SHORT_FORM]


def complete_draft(text: str) -> Iterator[tuple[str, str]]:
    """What `text` can become with one more drafter after its last '+', and what that drafter does. Drafters that `text`
    names already are left out.
    """
    *before, _ = text.split("+")
    taken = {part.partition(":")[0] for part in before}
    if not before:
        yield AUTO, "all that are available"
        yield NONE, "plain decoding"
    for word, spec in list_words():
        if word not in taken:
            yield "+".join([*before, word]), spec.summary


def describe_words() -> str:
    """The values of --draft in one line for the user, with trained heads as one group."""
    words = [format_word(word, spec) for word, spec in list_words() if spec.needs != "head"]
    heads = [format_word(word, spec) for word, spec in list_words() if spec.needs == "head"]
    return f"{', '.join([AUTO, NONE, *words, *heads])} (trained heads of the target), or a model; join them with '+'"


def format_word(word: str, spec: DrafterSpec) -> str:
    """`word` with the options that it takes: 'pard[:REF]'."""
    return word + ("[:REF]" if spec.needs in ("model", "head") else _OPTIONS.get(word, ""))


@contextmanager
def naming_drafters(reference: str | None) -> Iterator[None]:
    """Speaks of drafters too if `reference` turns out to name no model: the user may have mistyped one."""
    try:
        yield
    except UnknownModel as error:
        if reference is None or "/" in reference or reference.lower().endswith(".gguf"):
            raise
        words = [word for word, _ in list_words()]
        near = difflib.get_close_matches(reference.partition(":")[0], [*words, AUTO, NONE], n=1)
        start = f"Did you mean {near[0]}? " if near else ""
        hint = f"{start}Drafters: {', '.join(words)}. `edgespec list` shows the models."
        message = f"no drafter is called {reference!a}, and {error.message.replace('There is', 'there is', 1)}"
        raise UnknownModel(message, hint=hint) from None


def _split(text: str) -> list[str]:
    """The parts between '+' signs. One that names no drafter continues a draft model's path, which may contain '+'.

    Raises InvalidRequest.
    """
    parts: list[str] = []
    for part in text.split("+"):
        names_model = bool(parts) and (_find_name(parts[-1]) is None or parts[-1].startswith("model:"))
        if names_model and _find_name(part) is None:
            parts[-1] += f"+{part}"
        else:
            parts.append(part)
    if len(parts) > 1 and (AUTO in parts or NONE in parts):
        word = AUTO if AUTO in parts else NONE
        raise InvalidRequest(f"'{word}' cannot be joined with other drafters.", hint="Name them, as in ngram+model.")
    if "" in parts:
        raise InvalidRequest(f"the draft '{text}' leaves a drafter out.", hint="Name drafters as in ngram+model.")
    return parts


def _find_name(part: str) -> str | None:
    """The drafter that `part` names, with or without options."""
    spec = find_spec(part.partition(":")[0])
    return spec.name if spec is not None else None


def name_cures(spec: DrafterSpec) -> str:
    """What a user can do if the tokens of a drafter are accepted too seldom to pay, without a full stop."""
    cures = ["`edgespec adapt` trains it on your texts"] if spec.name in TRAINED else []
    if spec.needs != "head":
        cures.append("`edgespec draft train` makes a head for the model")
    return ", ".join([*cures, "--draft ngram leaves it out"])
