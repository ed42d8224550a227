"""The drafters of a target whose files are not on this machine, by the registry."""

from __future__ import annotations

from collections.abc import Iterator

from edgespec.backends import FileBackend
from edgespec.errors import UnknownModel
from edgespec.export.plan import Draft
from edgespec.export.weights import describe_weights
from edgespec.models.draft_words import AUTO, parse_draft
from edgespec.models.heads import drafter_of, runs
from edgespec.models.references import Alias, Reference, parse_reference
from edgespec.models.registry import Entry, Pair, Registry


def list_paired(pair: Pair, backend: FileBackend, registry: Registry, draft: str, given: str | None) -> Iterator[Draft]:
    """The drafters that a value of `--draft` asks for; `given` is what the user says of the draft's original weights.

    Raises UnknownModel, InvalidRequest.
    """

    def describe(method: str, reference: Reference) -> Draft:
        weights = describe_weights(reference, registry, given=given, is_head=method != "model")
        return Draft(method, weights, acceptance=pair.acceptance if reference == pair.draft else None)

    paired = {"ngram": Draft("ngram")}
    if pair.with_head is not None and _find_repo(pair.with_head) == _find_repo(pair.target):
        paired["mtp"] = Draft("mtp")
    for method, reference in (("model", pair.draft), ("pard", pair.pard)):
        if reference is not None:
            paired[method] = describe(method, reference)
    if pair.head is not None and pair.head_kind is not None and runs(backend, pair.head_kind):
        paired[drafter_of(pair.head_kind).name] = describe(pair.head_kind, pair.head)
    if draft == AUTO:
        yield from paired.values()
        return
    for term in parse_draft(draft):
        name, needs_model = term.spec.name, term.spec.needs in ("model", "head")
        if needs_model and term.reference is not None:
            reference = parse_reference(term.reference)
            if isinstance(reference, Alias):
                reference = require_pair(registry.get(reference.name), backend).target
            is_paired_head = reference == pair.head and pair.head_kind is not None
            yield describe(pair.head_kind or name if is_paired_head else name, reference)
        elif name in paired or not needs_model:
            yield paired.get(name, Draft(name))
        else:
            raise UnknownModel(
                f"models.toml pairs no {name} with this target.",
                hint=f"Name one: --draft {name}:REF, or use --draft auto.",
            )


def _find_repo(reference: Reference) -> str | None:
    return getattr(reference, "repo", None)


def require_pair(entry: Entry, backend: FileBackend) -> Pair:
    """The pair for `backend`. Raises UnknownModel if there is none."""
    pair = entry.pair(backend)
    if pair is None:
        kind = "GGUF file" if backend == "llamacpp" else "MLX folder"
        raise UnknownModel(
            f"models.toml names no {kind} of {entry.alias}.",
            hint="Name a path, or export it to vllm, sglang or tensorrt-llm, which load the original weights.",
        )
    return pair
