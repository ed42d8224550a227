"""Forwards of one width: results that do not depend on what is drafted, on devices whose kernels change with the rows.

A kernel for four rows rounds in another way than one for a single row. Here every forward of a target has `width` rows,
the root, the draft and filler behind it, so the scores of a token are the same whether it was drafted or not. Drafts
are chains, because a branch of a tree lies in other cells of the cache than plain decoding's tokens.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from edgespec.backends import Model
from edgespec.backends.attached_draft import AttachedHead, Unsupported
from edgespec.backends.long_context import extend_cache
from edgespec.backends.options import EXACT_WIDTHS
from edgespec.backends.sequence import check_prompt, shared_prefix
from edgespec.core.arrays import Ints, Logits
from edgespec.core.decoding import read_prompt
from edgespec.core.peers import BatchPeers, Yield
from edgespec.core.protocols import Draft, PrefillProgress, Session
from edgespec.core.sampling import SamplingParams
from edgespec.core.scores import Scores
from edgespec.formats.heads import HeadSpec

_CHUNK = 512  # tokens of a prompt that the runtimes read in one forward
_CELLS = 256  # kernels may change where the cells that they read pass a multiple of it
_ACCEPTANCE = 0.7  # assumed acceptance rate of drafted tokens, by which widths are ranked
_TRIAL = 40  # tokens of the text that `check_width` decodes


class FixedWidthSession:
    """A session whose forwards, but for those of a prompt, have `width` rows. Takes chains of width - 1 tokens at most.

    A prompt is read in the same chunks whatever the cache holds, so of an earlier text only whole chunks of its prompt
    are reused. The last width - 1 tokens of the context remain empty.
    """

    def __init__(self, inner: Session, width: int) -> None:
        self.inner = inner
        self._width = width
        limits = inner.capabilities
        self.capabilities = replace(limits, context_size=limits.context_size - (width - 1), tree=False)
        self._prompt: list[int] = []  # tokens that the cache holds as prefill has computed them
        self.commit, self.checkpoint, self.close = inner.commit, inner.checkpoint, inner.close

    @property
    def position(self) -> int:
        return self.inner.position

    @property
    def peers(self) -> BatchPeers:
        return self.inner.peers

    @property
    def draft_limit(self) -> int:
        """The most draft nodes of the next forward.

        It ends early enough that each drafted token reads as many cells as it would if it were a root.
        """
        left = self.capabilities.context_size - self.position - 1
        end = (self.position + self._width) % _CELLS
        return max(0, min(self._width - 1, left, _CELLS - 1 - end if end else 0))

    def prefill(self, tokens: Sequence[int]) -> Generator[PrefillProgress | Yield, None, Scores]:
        check_prompt(tokens, self.capabilities)
        shared = shared_prefix(self._prompt[:-1], tokens, len(tokens) - 1)  # the last token may be a chunk of its own
        if self.rewind(shared // _CHUNK * _CHUNK) % _CHUNK:
            self.rewind(0)  # a checkpoint of a recurrent state lies elsewhere
        scores = yield from self.inner.prefill(tokens)
        self._prompt = list(tokens)
        return scores

    def adopt(self, other: Session, n: int) -> bool:
        return False

    def forward(self, root: int, draft: Draft, *, run_ahead: bool = False) -> Scores:
        if not draft.is_chain:
            raise ValueError("this session takes chains only")
        if self._width == 1:
            return self.inner.forward(root, draft, run_ahead=run_ahead)
        tokens = [root, *draft.tokens.tolist()]
        filler = [tokens[-1]] * (self._width - len(tokens))  # the same token again takes the same experts
        scores = self.inner.forward(root, Draft.chain([*tokens[1:], *filler]))
        return cast(Scores, _FirstRows(scores, len(tokens), self._width))

    def rewind(self, position: int) -> int:
        left = self.inner.rewind(position)
        del self._prompt[left:]
        return left

    def extend(self, n: int) -> int:
        return extend_cache(self.inner, min(n, self.capabilities.context_size))


class _FirstRows:
    """The scores of the rows before the filler; their times are those of the forward."""

    def __init__(self, scores: Scores, n: int, width: int) -> None:
        self._scores, self._n, self._width = scores, n, width

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scores, name)

    def argmax(self) -> Ints:
        return self._scores.argmax()[: self._n]

    def draw(self, params: SamplingParams, uniforms: Sequence[float]) -> Ints | None:
        drawn = self._scores.draw(params, [*uniforms, *[0.5] * (self._width - self._n)])
        return None if drawn is None else drawn[: self._n]

    def logits(self, row: int) -> Logits:
        if not 0 <= row < self._n:
            raise IndexError(f"row {row} of {self._n}")
        return self._scores.logits(row)


class FixedWidthModel:
    """A backends.Model whose sessions have forwards of `width` rows."""

    no_tree_reason = "a branch lies in other cells of the cache than plain decoding's tokens (--exact)"
    no_batching_reason = "the forwards of --exact have one width"
    is_row_invariant = True

    def __init__(self, inner: Model, width: int) -> None:
        self._inner = inner
        self.width = width
        self.tokenizer, self.chat_template = inner.tokenizer, inner.chat_template
        self.context_size = inner.context_size - (width - 1)
        self.description, self.layer_count = inner.description, inner.layer_count
        # Forwards of a self-draft have any width.
        self.make_self_draft, self.open_embedder, self.close = inner.make_self_draft, inner.open_embedder, inner.close

    def open_session(self, *, shared: bool = False) -> FixedWidthSession:
        return FixedWidthSession(self._inner.open_session(), self.width)

    def load_head(self, spec: HeadSpec, path: Path) -> AttachedHead:
        raise Unsupported(
            "--exact with forwards of one width takes no trained heads.", hint="Use --draft ngram, or drop --exact."
        )


def check_width(model: Model, width: int) -> bool:
    """Whether drafted tokens change no bit of any score at this width, tried on a short text.

    False for models that run accepted tokens again, in forwards of other widths. Raises Cancelled, BackendError.
    """
    if width == 1:
        return True
    found = []
    for longest in (0, width - 1):
        with closing(FixedWidthSession(model.open_session(), width)) as session:
            size = session.capabilities.vocab_size
            text = [(i * 7919 + 11) % size for i in range(min(_TRIAL, session.capabilities.context_size - 1))]
            read_prompt(session, text[: len(text) // 2])
            session.checkpoint()
            found.append(_decode(session, text, longest))
    plain, drafted = found
    return all((plain[at] == drafted[at]).all() for at in plain)


def _decode(session: Session, text: Sequence[int], longest: int) -> dict[int, Logits]:
    """Logits [V] by position of `text`, drafted in chains of up to `longest` tokens, of which one to three are kept."""
    found: dict[int, Logits] = {}
    while (at := session.position) < len(text):
        ahead = text[at + 1 : at + 1 + min(longest, session.draft_limit)]
        scores = session.forward(text[at], Draft.chain(ahead))
        kept = min(len(ahead), 1 + at % 3)
        found |= {at + row: scores.logits(row).copy() for row in range(1 + kept)}
        session.commit(range(kept))
    return found


def rank_widths(rows_s: Mapping[int, float]) -> list[int]:
    """Widths by expected seconds per token, the cheapest first, from seconds of forwards by their rows."""
    return sorted(
        (width for width in EXACT_WIDTHS if width in rows_s),
        key=lambda width: rows_s[width] * (1 - _ACCEPTANCE) / (1 - _ACCEPTANCE**width),
    )
