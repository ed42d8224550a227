"""The text of an export: a shell script with its remarks as comments."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterable, Iterator

from edgespec import __version__
from edgespec.export.engines import Choice, Engine, compare_vocabularies
from edgespec.export.gather import Draft, Exported, ExportPlan

_WIDTH = 98
_END = "EDGESPEC_END"


def format_script(exported: Exported, remarks: Iterable[str], *, with_files: bool) -> str:
    """The commands for a POSIX shell; the last one gets the script's own arguments.

    `with_files`: the script writes the files that they need; else they lie beside it.
    """
    parts = ["#!/bin/sh\n", "".join(map(_comment, remarks))]
    if exported.files:
        parts.append("set -e\n")
        if with_files:
            parts += [f"cat > {name} <<'{_END}'\n{text}{_END}\n" for name, text in exported.files.items()]
        else:
            parts.append('cd "$(dirname "$0")"\n')
    *before, last = map(format_command, exported.commands)
    parts += [f"{command}\n" for command in before]
    return "".join([*parts, f'{last} "$@"\n'])


def format_command(words: Iterable[str]) -> str:
    """A command for a shell; in a long one each option has a line of its own."""
    words = [shlex.quote(word) for word in words]
    line = " ".join(words)
    if len(line) <= _WIDTH:
        return line
    return "".join(f" \\\n  {word}" if word.startswith("-") else f" {word}" for word in words).strip()


def _comment(text: str) -> str:
    return "".join(
        f"# {line}\n"
        for line in textwrap.wrap(text, _WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    )


# What a user has to know of an export: figures, where they hold, and what stays behind.


def list_remarks(plan: ExportPlan, engine: Engine, choice: Choice, exported: Exported) -> Iterator[str]:
    """Sentences, the most important ones first."""
    yield f"{plan.name} for {engine.title}, written by edgespec {__version__}."
    if engine.backend is None:
        yield f"Weights: {plan.target.original} (named by {plan.target.known_from})."
    if choice.draft is None:
        yield "Drafts: none."
    else:
        yield from _describe_draft(choice.draft, choice.length, engine)
        yield from _describe_figures(choice.draft, plan, engine)
        if None in (compare_vocabularies(plan, choice.draft, engine) or ()):
            yield (
                f"{engine.title} refuses to start if vocab_size in the config.json of target and draft differs; that "
                "is not known here. If it does, export with --draft ngram."
            )
    yield from exported.remarks
    for label, reason in choice.refusals.items():
        yield f"Left out: {label}: {reason}."
    if choice.draft is not None:
        yield (
            "Stays behind: the autopilot, which drafts only where that pays; draft trees; earlier texts, and drafts "
            "that learn from answers; tokens that a JSON schema forces."
        )


def _describe_draft(draft: Draft, length: int | None, engine: Engine) -> Iterator[str]:
    name = draft.label
    if engine.backend is None and draft.weights is not None:
        name = f"{draft.weights.original} ({draft.method}; named by {draft.weights.known_from})"
        if draft.version is not None and not draft.weights.is_folder:
            yield (
                f"The draft in use is version {draft.version}, adapted on this machine; {engine.title} cannot load it "
                "and gets the draft that it was made from."
            )
    if length is None:
        yield f"Drafts: {name}, of lengths that {engine.title} finds."
        return
    kind = "those of its block" if length == draft.block else "a usual number"
    yield f"Drafts: {name}, {length} tokens, {kind}."


def _describe_figures(draft: Draft, plan: ExportPlan, engine: Engine) -> Iterator[str]:
    others = ", and for the files in use, not for the original weights" if engine.backend is None else ""
    again = f"That is for one request at a time{others}: measure again there."
    if draft.measured is not None:
        yield (
            f"Acceptance measured here ({plan.machine}; {draft.measured.sampling}): {draft.measured.acceptance:.0%} of "
            f"the tokens that follow accepted ones. {again}"
        )
    elif draft.acceptance is not None:
        low, high = draft.acceptance
        yield f"Acceptance by the registry, of the quantized pair: {low:.0%} to {high:.0%} of the tokens. {again}"
    if engine.measure:
        yield f"To see the acceptance: {engine.measure}."
