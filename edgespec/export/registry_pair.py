"""The drafters of a target whose files are not on this machine, by what the registry says of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from edgespec.backends import FileBackend
from edgespec.errors import UnknownModel
from edgespec.export.plan import Draft
from edgespec.export.weights import describe_weights
from edgespec.hub.reference import Alias, Reference, parse_reference
from edgespec.planner.draft_request import AUTO, DraftTerm, parse_draft
from edgespec.planner.heads import drafter_of, refuse_kind
from edgespec.registry.schema import Entry, Pair, Registry


@dataclass(frozen=True, slots=True)
class RegistryPair:
    """A pair of models.toml; `given` is what the user says of the original weights of its draft."""

    pair: Pair
    backend: FileBackend
    registry: Registry
    given: str | None

    def list_drafts(self, text: str) -> Iterator[Draft]:
        """The drafters that a value of `--draft` asks for. Raises UnknownModel, InvalidRequest."""
        if text == AUTO:
            yield from self._list_all()
        else:
            yield from map(self._find, parse_draft(text))

    def _list_all(self) -> Iterator[Draft]:
        pair = self.pair
        yield Draft("ngram")
        if pair.draft is not None:
            yield self._describe("model", pair.draft)
        if pair.pard is not None:
            yield self._describe("pard", pair.pard)
        if pair.head is not None and pair.head_kind and not refuse_kind(self.backend, "", pair.head_kind):
            yield self._describe(pair.head_kind, pair.head)
        elif self._has_own_head:
            yield Draft("mtp")

    def _find(self, term: DraftTerm) -> Draft:
        name, pair = term.spec.name, self.pair
        if term.spec.needs not in ("model", "head"):
            return Draft(name)
        if term.reference is not None:
            reference = parse_reference(term.reference)
            if isinstance(reference, Alias):
                reference = require_pair(self.registry.get(reference.name), self.backend).target
            is_paired_head = reference == pair.head and pair.head_kind is not None
            return self._describe(pair.head_kind or name if is_paired_head else name, reference)
        if name == "mtp" and self._has_own_head:
            return Draft(name)
        if pair.head is not None and pair.head_kind is not None and drafter_of(pair.head_kind).name == name:
            return self._describe(pair.head_kind, pair.head)
        paired = {"model": pair.draft, "pard": pair.pard}.get(name)
        if paired is None:
            raise UnknownModel(
                f"models.toml pairs no {name} with this target.",
                hint=f"Name one: --draft {name}:REF, or use --draft auto.",
            )
        return self._describe(name, paired)

    @property
    def _has_own_head(self) -> bool:
        """Whether the target's own file holds an MTP head."""
        repo = getattr(self.pair.with_head, "repo", None)
        return repo is not None and repo == getattr(self.pair.target, "repo", None)

    def _describe(self, method: str, reference: Reference) -> Draft:
        weights = describe_weights(reference, self.registry, given=self.given, is_head=method != "model")
        return Draft(method, weights, acceptance=self.pair.acceptance if reference == self.pair.draft else None)


def require_pair(entry: Entry, backend: FileBackend) -> Pair:
    """The pair for `backend`. Raises UnknownModel where there is none."""
    pair = entry.pair(backend)
    if pair is None:
        kind = "GGUF file" if backend == "llamacpp" else "MLX folder"
        raise UnknownModel(
            f"models.toml names no {kind} of {entry.alias}.",
            hint="Name a path, or export it to vllm, sglang, tensorrt-llm or tgi, which load the original weights.",
        )
    return pair
