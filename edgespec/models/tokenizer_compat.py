"""Tells whether a draft model's vocabulary is the target's: one rule, before the download and after loading.

The rule, over a `Vocabulary`:

- The kind of tokenizer, the ids of BOS, EOS and end of turn, and the add-BOS flag agree if both state them.
- Every id that both have is spelled the same.
- An id that only one has is no ordinary text: it is a control token, or spelled like one (<image>). Models of one
  family differ in such tokens. The draft never proposes an id that the target lacks, and stops drafting if the
  text has one that it lacks itself.

Padding is no part of a vocabulary, because conversions round the number of ids up differently. Pre-tokenizer and
scores are not compared, because only the target splits text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256

import numpy as np

from edgespec.formats.gguf import Header
from edgespec.formats.head_file import ModelMetadata
from edgespec.formats.mlx_folder import Folder
from edgespec.text.tokenizer import Tokenizer

_CONTROL, _UNUSED = 3, 5  # tokenizer.ggml.token_type
_PADDING = re.compile(r"\[PAD\d*\]|<\|?(?:reserved|unused|dummy)[^>]*>", re.IGNORECASE)
_HASHED = 16  # one token of so many counts: some runtimes take 8 us to spell one
_MARK = re.compile(r"<[^<>]+>")
_IDS = {"bos_token_id": "first token (BOS)", "eos_token_id": "last token (EOS)", "eot_token_id": "end of turn"}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What the rule compares.

    tokens      spelling by id, without padding
    size        number of ids, with padding
    is_control  whether an id of `tokens` is a control token
    kind        name of the tokenizer model; None if it is not stated
    ids         special ids that are stated, by their description
    add_bos     whether every text starts with BOS; None if it is not stated
    """

    tokens: Mapping[int, str]
    size: int
    is_control: Callable[[int], bool]
    kind: str | None = None
    ids: Mapping[str, int] = field(default_factory=dict)
    add_bos: bool | None = None


def find_tokenizer_mismatch(target: ModelMetadata | Tokenizer, draft: ModelMetadata | Tokenizer) -> str | None:
    """The first difference of the two vocabularies, as a sentence without its full stop; None if they agree.

    None also if they cannot be compared before loading: a GGUF header with a folder, or a folder without
    tokenizer.json. Raises InvalidModelFile for a folder whose vocabulary is damaged.
    """
    if isinstance(target, Folder) != isinstance(draft, Folder):
        return None
    ours, theirs = _read_vocabulary(target), _read_vocabulary(draft)
    return None if ours is None or theirs is None else _compare(ours, theirs)


def identify_tokenizer(tokenizer: Tokenizer) -> str:
    """A hash of the vocabulary: the spellings of every sixteenth token, padding left out.

    It is the same for all quantizations of a model and on all runtimes, so that they can use each other's texts.
    """
    tokens = range(0, tokenizer.vocab_size, _HASHED)
    spelled = _drop_padding({token: tokenizer.special_text(token) for token in tokens})
    return sha256("\0".join(f"{token} {text}" for token, text in spelled.items()).encode()).hexdigest()


def _compare(target: Vocabulary, draft: Vocabulary) -> str | None:
    if None not in (target.kind, draft.kind) and target.kind != draft.kind:
        return f"the target's tokenizer is {target.kind!a}, the draft's is {draft.kind!a}"
    for name, token in target.ids.items():
        if draft.ids.get(name, token) != token:
            return f"the {name} is id {token} in the target and id {draft.ids[name]} in the draft"
    ours, theirs = target.tokens, draft.tokens
    differing = min((token for token in ours.keys() & theirs.keys() if ours[token] != theirs[token]), default=None)
    if differing is not None:
        return f"token {differing} is {ours[differing]!a} in the target and {theirs[differing]!a} in the draft"
    surplus = _find_surplus("target", target, draft) or _find_surplus("draft", draft, target)
    if surplus is not None:
        return surplus
    if None not in (target.add_bos, draft.add_bos) and target.add_bos != draft.add_bos:
        with_bos, without = ("target", "draft") if target.add_bos else ("draft", "target")
        return f"the {with_bos} starts every text with a BOS token and the {without} does not"
    return None


def _find_surplus(name: str, vocabulary: Vocabulary, other: Vocabulary) -> str | None:
    """The first ordinary token that only `vocabulary` has."""
    tokens = vocabulary.tokens
    ordinary = (
        token
        for token in tokens.keys() - other.tokens.keys()
        if not _MARK.fullmatch(tokens[token]) and not vocabulary.is_control(token)
    )
    first = min(ordinary, default=None)
    if first is None:
        return None
    return f"only the {name} has token {first}, {tokens[first]!a}: {vocabulary.size:,} tokens against {other.size:,}"


def _read_vocabulary(model: ModelMetadata | Tokenizer) -> Vocabulary | None:
    if isinstance(model, Header):
        return _read_header(model)
    if isinstance(model, Folder):
        found = model.vocabulary
        if found is None:
            return None
        return Vocabulary(_drop_padding(found), len(found), lambda token: token in model.control_tokens)
    ids = {} if model.bos is None else {_IDS["bos_token_id"]: model.bos}
    spelled = {token: model.special_text(token) for token in range(model.vocab_size)}
    return Vocabulary(
        _drop_padding(spelled), model.vocab_size, lambda token: not model.piece(token), ids=ids, add_bos=model.add_bos
    )


def _read_header(header: Header) -> Vocabulary:
    metadata, spelled = header.metadata, header.tokens
    column = metadata.get("tokenizer.ggml.token_type")
    types = column[: len(spelled)] if isinstance(column, np.ndarray) else np.zeros(0, np.int32)
    tokens = _drop_padding(dict(enumerate(spelled)))
    for token in np.flatnonzero(types == _UNUSED).tolist():
        tokens.pop(token, None)
    control = set(np.flatnonzero(types == _CONTROL).tolist())
    kind, add_bos = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.add_bos_token")
    ids = {name: found for key, name in _IDS.items() if (found := header.integer(f"tokenizer.ggml.{key}")) is not None}
    return Vocabulary(
        tokens,
        len(spelled),
        control.__contains__,
        kind if isinstance(kind, str) else None,
        ids,
        add_bos if isinstance(add_bos, bool) else None,
    )


def _drop_padding(tokens: Mapping[int, str]) -> dict[int, str]:
    return {i: text for i, text in tokens.items() if text[:1] not in ("[", "<") or not _PADDING.fullmatch(text)}
