"""The text of an export: a shell script with its remarks as comments, and a file for Docker Compose."""

from __future__ import annotations

import json
import shlex
import textwrap
from collections.abc import Iterable, Iterator

from edgespec import __version__
from edgespec.export.engines import Choice, Engine, compare_vocabularies
from edgespec.export.gather import Container, Draft, Exported, ExportPlan

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
    words = list(words)
    if len(line := shlex.join(words)) <= _WIDTH:
        return line
    lines: list[list[str]] = [[]]
    for word in words:
        if word.startswith("-"):
            lines.append([])
        lines[-1].append(word)
    return " \\\n  ".join(map(shlex.join, lines))


def format_compose(container: Container) -> str:
    """compose.yaml. Its values are JSON, which YAML reads; a `$` of theirs is doubled, as Compose has it."""
    lines = [_comment(container.remark).rstrip()] if container.remark else []
    lines += ["services:", "  model:", f"    image: {json.dumps(container.image)}"]
    if container.entrypoint:
        lines.append(f"    entrypoint: {_quote(container.entrypoint)}")
    lines.append(f"    command: {_quote(container.command)}")
    lines.append(f"    ports: {_quote([f'127.0.0.1:{container.port}:{container.port}'])}")
    lines.append('    environment: ["HF_TOKEN"]  # of your shell; some repositories ask for it')
    lines.append("    volumes:")
    lines += [f"      - {_format_volume(*volume)}" for volume in container.volumes]
    if container.has_gpu:
        lines.append("    ipc: host")
        devices = "[{driver: nvidia, count: all, capabilities: [gpu]}]"
        lines.append(f"    deploy: {{resources: {{reservations: {{devices: {devices}}}}}}}")
    named = ", ".join(f"{source}: {{}}" for source, _ in container.volumes if not _is_path(source))
    return "\n".join([*lines, f"volumes: {{{named}}}"]) + "\n"


def _format_volume(source: str, target: str) -> str:
    kind, ending = ("bind", ", read_only: true") if _is_path(source) else ("volume", "")
    return f"{{type: {kind}, source: {_quote(source)}, target: {_quote(target)}{ending}}}"


def _is_path(source: str) -> bool:
    return source.startswith(("/", "."))


def _quote(words: str | Iterable[str]) -> str:
    """A text or a list of texts."""
    escaped = words if isinstance(words, str) else list(words)
    return json.dumps(escaped, ensure_ascii=False).replace("$", "$$")


def _comment(text: str) -> str:
    return "".join(
        f"# {line}\n"
        for line in textwrap.wrap(text, _WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    )


# What a user has to know of an export: figures, where they hold, and what stays behind.


_DEPTHS = 4  # of drafted tokens whose acceptance is shown


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
    yield from (f"Stays behind: {each}." for each in _list_lost(plan, engine, choice))
    if engine.backend is None:
        yield from plan.hints


def _describe_draft(draft: Draft, length: int | None, engine: Engine) -> Iterator[str]:
    name = draft.label
    if engine.backend is None and draft.weights is not None:
        name = f"{draft.weights.original} ({draft.method}; named by {draft.weights.known_from})"
        if draft.version is not None and not draft.weights.is_folder:
            yield (
                f"The draft in use is version {draft.version}, adapted on this machine; {engine.title} cannot load it "
                "and gets the draft that it was made from."
            )
    measured = draft.measured
    if length is None:
        yield f"Drafts: {name}, of lengths that {engine.title} finds."
    elif measured is not None and measured.length == length:
        yield (
            f"Drafts: {name}, {length} tokens: the fastest fixed length by what was measured here, "
            f"{measured.speedup:.2f} times plain decoding."
        )
    elif measured is not None and measured.length:
        yield f"Drafts: {name}, {length} tokens, those of its block; {measured.length} would be the fastest here."
    elif measured is not None:
        yield f"Drafts: {name}, {length} tokens, a usual number: here such drafts are not faster than plain decoding."
    elif length == draft.block:
        yield f"Drafts: {name}, {length} tokens, those of its block: not enough was measured here; see `edgespec tune`."
    else:
        yield f"Drafts: {name}, {length} tokens, a usual number: not enough was measured here; see `edgespec tune`."


def _describe_figures(draft: Draft, plan: ExportPlan, engine: Engine) -> Iterator[str]:
    measured = draft.measured
    if measured is not None:
        rate = measured.acceptance
        depths = ", ".join(f"{rate**depth:.0%}" for depth in range(1, _DEPTHS + 1))
        yield (
            f"Acceptance measured here ({measured.sampling}): {rate:.0%} of the tokens that follow accepted ones. At "
            f"that rate drafts are right up to tokens 1, 2, 3 and 4 in {depths} of the rounds."
        )
    elif draft.acceptance is not None:
        low, high = draft.acceptance
        yield f"Acceptance by the registry, of the quantized pair: {low:.0%} to {high:.0%} of the drafted tokens."
    if measured is not None or draft.acceptance is not None:
        where = f" ({plan.machine})" if measured is not None else ""
        others = ", and for the files in use, not for the original weights" if engine.backend is None else ""
        yield f"These figures are for one request at a time on one machine{where}{others}: measure again there."
    if engine.measure:
        yield f"To see the acceptance: {engine.measure}."


def _list_lost(plan: ExportPlan, engine: Engine, choice: Choice) -> Iterator[str]:
    """What edgespec does with the pair and the engine does not."""
    if choice.draft is None:
        return
    yield f"the autopilot; {engine.title} drafts also where that does not pay"
    yield "draft trees; a chain is exported"
    yield "earlier texts, and drafts that learn from answers"
    yield "tokens that a JSON schema forces, which edgespec drafts without a model"
