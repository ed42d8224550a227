"""Whether two vocabularies give every id the same meaning, so that one model may draft for the other."""

from __future__ import annotations

from edgespec.text.tokenizer import Tokenizer


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
