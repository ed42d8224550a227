"""Whether a draft speaks the target's tokens, decided before their weights are downloaded or loaded."""

from __future__ import annotations

import re

import numpy as np

from edgespec.formats.gguf import Header
from edgespec.formats.metadata import ModelMetadata
from edgespec.formats.mlx_folder import Folder
from edgespec.text.tokenizer import Tokenizer

# token_type of ids that exist only to round the vocabulary up, and of marks that stand for no text: a model that sees
# has some that its small sibling lacks.
CONTROL, UNUSED = 3, 5
_PADDING = re.compile(r"\[PAD\d*\]|<\|?reserved[^>]*>|<\|?unused[^>]*>|<\|?dummy[^>]*>", re.IGNORECASE)
_IDS = (("bos_token_id", "first token (BOS)"), ("eos_token_id", "last token (EOS)"), ("eot_token_id", "end of turn"))


def tokenizer_mismatch(target: ModelMetadata, draft: ModelMetadata) -> str | None:
    """The first reason why the two vocabularies differ, in plain words; None where they agree.

    Of a folder and a GGUF file nothing can be said before both are loaded.
    """
    if isinstance(target, Folder) and isinstance(draft, Folder):
        return _folder_mismatch(target, draft)
    if isinstance(target, Folder) or isinstance(draft, Folder):
        return None
    return _gguf_mismatch(target, draft)


def _folder_mismatch(target: Folder, draft: Folder) -> str | None:
    """The first token that differs, in plain words; None where both agree, or where one cannot be read before loading.

    Ids that only one of them has are not compared: embeddings are padded differently.
    """
    ours, theirs = target.vocabulary, draft.vocabulary
    if ours is None or theirs is None:
        return None
    for token in sorted(ours.keys() & theirs.keys()):
        if ours[token] != theirs[token]:
            return f"token {token} is {ours[token]!a} in the target and {theirs[token]!a} in the draft"
    return None


def _gguf_mismatch(target: Header, draft: Header) -> str | None:
    """The first reason why the two vocabularies differ, in plain words; None where they are the same.

    Compared: the tokenizer model, every token by its bytes, the BOS and EOS ids, the end-of-turn id and the add-BOS
    flag where both files state them. Not compared: token types, scores and the pre-tokenizer, since only the target
    ever splits text. One vocabulary may be longer, because conversions round the count up differently: then each
    surplus id must be marked unused or control (token_type 5, 3) or carry a padding name ([PAD123], <|reserved...|>,
    <unused7>). They are never drafted, and a draft model that cannot read one rests from there on.
    """
    models = [_text(header, "tokenizer.ggml.model") for header in (target, draft)]
    if models[0] != models[1]:
        return f"the target's tokenizer is {models[0]}, the draft's is {models[1]}"
    for key, name in _IDS:
        mine, other = (header.integer(f"tokenizer.ggml.{key}") for header in (target, draft))
        if mine is not None and other is not None and mine != other:
            return f"the {name} is id {mine} in the target and id {other} in the draft"
    first = _first_difference(_tokens(target), _tokens(draft))
    if first is not None:
        return first
    surplus = _surplus(target, draft, "target") or _surplus(draft, target, "draft")
    if surplus is not None:
        return surplus
    flags = [header.metadata.get("tokenizer.ggml.add_bos_token") for header in (target, draft)]
    if None not in flags and flags[0] != flags[1]:
        with_bos, without = ("target", "draft") if flags[0] else ("draft", "target")
        return f"the {with_bos} starts every text with a BOS token and the {without} does not"
    return None


def _tokens(header: Header) -> list[str]:
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list):
        raise header.invalid("it holds no vocabulary (tokenizer.ggml.tokens)")
    return tokens


def _text(header: Header, key: str) -> str:
    found = header.metadata.get(key)
    return ascii(found) if isinstance(found, str) else "not named"


def _first_difference(target: list[str], draft: list[str]) -> str | None:
    common = min(len(target), len(draft))
    if target[:common] == draft[:common]:
        return None
    token = next(index for index in range(common) if target[index] != draft[index])
    return f"token {token} is {target[token]!a} in the target and {draft[token]!a} in the draft"


def _surplus(longer: Header, shorter: Header, name: str) -> str | None:
    """The first id that only `longer` has and that text may use."""
    tokens, common = _tokens(longer), len(_tokens(shorter))
    types = longer.metadata.get("tokenizer.ggml.token_type")
    for token in range(common, len(tokens)):
        unused = isinstance(types, np.ndarray) and token < len(types) and int(types[token]) in (CONTROL, UNUSED)
        if not unused and not _PADDING.fullmatch(tokens[token]):
            return f"only the {name} has token {token}, {tokens[token]!a}: {len(tokens):,} tokens against {common:,}"
    return None


def vocabulary_mismatch(target: Tokenizer, draft: Tokenizer) -> str | None:
    """Why `draft` cannot propose tokens for `target`, or None where it can.

    Every id that both have must be spelled the same, special tokens included, and sequences must begin with the same
    BOS. Where one vocabulary is longer, its further ids are padding of the embedding and are never drafted; more than
    1,024 of them and more than 5% of the vocabulary are taken for another vocabulary.
    """
    shorter, longer = sorted((target.vocab_size, draft.vocab_size))
    if longer - shorter > max(1024, longer // 20):
        return f"its vocabulary has {draft.vocab_size:,} tokens, the target's {target.vocab_size:,}"
    if (target.add_bos, target.bos) != (draft.add_bos, draft.bos):
        return f"sequences begin with {_bos(target)} in the target and {_bos(draft)} in the draft"
    for token in range(shorter):
        ours, theirs = target.special_text(token), draft.special_text(token)
        if ours != theirs:
            return f"token {token} is {ours!r} in the target and {theirs!r} in the draft"
    return None


def _bos(tokenizer: Tokenizer) -> str:
    if not tokenizer.add_bos or tokenizer.bos is None:
        return "no BOS"
    return repr(tokenizer.special_text(tokenizer.bos))
