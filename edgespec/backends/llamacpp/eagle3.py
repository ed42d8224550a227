"""EAGLE-3 heads on llama.cpp (Li et al. 2025): one layer that drafts from hidden states of the target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from edgespec.backends.attached_draft import AttachedHead, Unsupported
from edgespec.backends.features import Features
from edgespec.backends.llamacpp.draft_ids import check_ids
from edgespec.backends.llamacpp.head_context import MAX_ROWS, HeadContext
from edgespec.backends.llamacpp.session import LlamaSession
from edgespec.backends.llamacpp.taps import Floats
from edgespec.backends.llamacpp.weights import LlamaWeights, load_weights
from edgespec.backends.sequence import shared_prefix
from edgespec.core.arrays import Logits
from edgespec.core.protocols import CheckCancelled, Draft, Session
from edgespec.core.scores import HostScores, Scores
from edgespec.errors import BackendError
from edgespec.formats.gguf import Header
from edgespec.formats.gguf_validate import read_file
from edgespec.formats.heads import HeadSpec, usual_layers

_OTHER_HEAD = "Use a head that was trained for this model, or --draft auto."
_N_LAYERS = 3  # whose inputs llama.cpp's encoder takes


class Eagle3Session:
    """A DraftSession. Its cache has a pair of each position: the target's state there and the token after it.

    The pairs of drafted tokens have the head's own states. They are read again, with the target's, once the target has
    accepted them.
    """

    is_lazy = False

    def __init__(self, head: HeadContext, target: LlamaSession, features: Features[Floats]) -> None:
        """`features` are those of `target`, whose tap ends with this session.

        `head` holds as many pairs as the target tokens, and is freed.
        """
        self._head = head
        self._target = target
        self._features = features
        self._context_size = target.capabilities.context_size
        self._text: list[int] = []  # the `_base` tokens that were emitted, then the drafted ones
        self._base = 0
        self._first = 0  # position of the first pair; those from there to the last token but one are held
        self._state: Floats | None = None  # of the last pair

    @property
    def text(self) -> Sequence[int]:
        return self._text

    def begin(self, text: Sequence[int]) -> None:
        """Keeps the pairs of the prefix that `text` shares with the last one."""
        self._base = shared_prefix(self._text[: self._base], text, len(text) - 1)
        del self._text[self._base :]

    def unread(self, text: Sequence[int]) -> int:
        """Pairs of `text` that are not in the cache."""
        return len(text) - 1 - max(self._settle(text), self._features.start)

    def read(self, text: Sequence[int], window: int) -> Logits | None:
        """As core.drafter.DraftSession. None where no pair can be made, such as for a text of one token.

        Where the target has gone back behind states that were released, the pairs before are not read.
        """
        held, last = self._settle(text), len(text) - 1
        if self._features.end < last:
            raise BackendError("the head has no hidden states of the text.", hint="Report this as a bug.")
        window = max(1, min(window, self._context_size // 2))
        first = max(held, self._features.start)
        if first > held or last - first > window or last - self._first > self._context_size:
            self._text, self._base = [], 0
            self._first = first = max(self._features.start, last - window)
            held = 0
        self._head.trim(held)
        logits = None
        for start in range(first, last, MAX_ROWS):
            end = min(start + MAX_ROWS, last)
            fused = self._head.encode(self._features.take(start, end), start)
            logits, self._state = self._head.decode(text[start + 1 : end + 1], fused, start)
        self._text += text[len(self._text) :]
        self._base = len(text)
        self._features.release(last - 1)  # another token may follow the last row
        return logits

    def step(self, token: int) -> Logits | None:
        position = len(self._text) - 1
        if position - self._first >= self._context_size:
            return None
        assert self._state is not None, "read comes first"
        logits, self._state = self._head.decode([token], self._state, position)
        self._text.append(token)
        return logits

    def rollout(self, text: Sequence[int], window: int, n: int) -> tuple[Draft, Scores] | None:
        logits = self.read(text, window)
        rows: list[Logits] = []
        while logits is not None and len(rows) < n:
            rows.append(logits)
            logits = self.step(int(logits.argmax())) if len(rows) < n else None
        return (Draft.chain([int(row.argmax()) for row in rows]), HostScores(rows)) if rows else None

    def close(self) -> None:
        self._target.untap()
        self._head.free()

    def _settle(self, text: Sequence[int]) -> int:
        """Forget drafted tokens; returns the position after the last pair whose token is in `text`."""
        self._base = min(self._base, len(text) - 1)
        del self._text[self._base :]
        held = self._base - 1
        if held <= self._first:
            self._first = held = 0
        return held


class HeadWeights(LlamaWeights):
    """The weights of a head's GGUF file."""

    def open_context(self, target: LlamaSession, width: int, check: CheckCancelled) -> HeadContext:
        """A context that holds as much as `target`. Raises BackendError, Unsupported."""
        params = self._params(target.capabilities.context_size)
        params.ctx_other = target.context.native.handle
        vocab_size = self.tokenizer.vocab_size
        return HeadContext(self._lib, self._handle, params, width=width, vocab_size=vocab_size, check=check)


class LlamaHead(AttachedHead):
    """An EAGLE-3 head beside its target."""

    def __init__(self, target: LlamaWeights, head: HeadWeights, layers: Sequence[int], width: int) -> None:
        """`layers` of the target have rows of `width` numbers in all. `close` frees `head`."""
        self.tokenizer = target.tokenizer
        self.name = "eagle3"
        self.extra_bytes = head.path.stat().st_size
        self._head = head
        self._layers = layers
        self._width = width

    def open_session(self, target: Session, check: CheckCancelled) -> Eagle3Session:
        """A DraftSession for `target`, which holds no tokens yet. Raises BackendError, Unsupported."""
        assert isinstance(target, LlamaSession)
        features = target.tap(self._layers)
        try:
            context = self._head.open_context(target, self._width, check)
        except BaseException:
            target.untap()
            raise
        return Eagle3Session(context, target, features)

    def close(self) -> None:
        self._head.close()


def open_head(
    target: LlamaWeights,
    path: Path,
    spec: HeadSpec,
    progress: Callable[[float], None] = lambda fraction: None,
    check: CheckCancelled = lambda: None,
) -> LlamaHead:
    """Load the EAGLE-3 head in a GGUF file, which `spec` describes, for `target`.

    Raises Unsupported for a head that llama.cpp cannot run on this target, InvalidModelFile, Cancelled.
    """
    layers = usual_layers(target.layer_count) if spec.layers is None else spec.layers
    if spec.feeds_normed or spec.norm_before_fc == "each" or len(layers) != _N_LAYERS:
        raise Unsupported(
            f"llama.cpp runs EAGLE-3 heads over {_N_LAYERS} layers of the target, and no other dialect.",
            hint="Use --draft auto.",
        )
    if spec.hidden_size != target.hidden_size:
        raise Unsupported(
            f"{path.name} is a head for a hidden size of {spec.hidden_size}; the model has {target.hidden_size}.",
            hint=_OTHER_HEAD,
        )
    _check_file(read_file(path), path, spec, target.tokenizer.vocab_size)
    head = load_weights(HeadWeights, path, target.options, progress=progress, check=check)
    if head.tokenizer.vocab_size != target.tokenizer.vocab_size:
        head.close()
        raise Unsupported(f"{path.name} has another vocabulary than the model.", hint=_OTHER_HEAD)
    return LlamaHead(target, head, layers, len(layers) * spec.hidden_size)


def _check_file(header: Header, path: Path, spec: HeadSpec, vocab_size: int) -> None:
    """Raises InvalidModelFile where llama.cpp would load the file and abort later."""
    tensors = {tensor.name: tensor for tensor in header.tensors}
    if header.own("block_count") != 1:
        raise header.invalid("an EAGLE-3 head has one layer")
    if header.own("attention.key_length") != header.own("attention.value_length"):
        raise header.invalid("its keys and values differ in size")
    embedding, output = tensors.get("token_embd.weight"), tensors.get("output.weight")
    if (embedding is None or output is None) and spec.size != spec.hidden_size:
        raise header.invalid("it needs embeddings and an output matrix of its own size")
    if embedding is not None and embedding.shape[-1] != vocab_size:
        raise header.invalid(f"its embeddings have {embedding.shape[-1]} rows, and the model {vocab_size} tokens")
    rows = vocab_size if output is None else output.shape[-1]
    if (d2t := tensors.get("d2t")) is not None:
        check_ids(header, path, d2t, rows, vocab_size)
    elif rows != vocab_size:
        raise header.invalid(f"its output matrix has {rows} rows, and the model {vocab_size} tokens")
