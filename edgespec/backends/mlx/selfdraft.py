"""Self-drafts on MLX: some of the target's own layers, fewer bits, and some of its cached rows."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from edgespec.backends.attached_draft import AttachedDraft, SelfDraftSpec, Unsupported
from edgespec.backends.mlx.caches import SLACK, KeyValues
from edgespec.backends.mlx.library import map_errors
from edgespec.backends.mlx.runner import LayerHooks, LayerPass, ModelRunner, get_layers
from edgespec.backends.mlx.scores import DeviceDraft, MlxScores, chain_rows, greedy_chain
from edgespec.backends.mlx.session import MAX_ROWS, MlxSession
from edgespec.backends.sequence import (
    check_committed,
    check_forward,
    check_ids,
    check_prompt,
    kept_tokens,
    shared_prefix,
)
from edgespec.core.protocols import (
    NO_DRAFT,
    SOLO,
    CheckCancelled,
    Draft,
    PrefillProgress,
    Session,
    Yield,
)
from edgespec.core.sampling import Logits
from edgespec.core.scores import HostScores, Scores
from edgespec.core.verify import read_prompt
from edgespec.errors import BackendError, ContextOverflow, EdgespecError, reason_of
from edgespec.text.tokenizer import Tokenizer

# A session that drafts for another of the same model, over the same caches or over extracts of them.


class SharedKVSession:
    """A Session for drafts, which are chains. Holds the tokens of its target, and a tail of its own.

    The tail is dropped when the target computes or drops anything. In caches with windows it is limited to SLACK
    tokens, because a longer one may push out rows that the target needs.
    """

    peers = SOLO

    def __init__(self, target: MlxSession, network: MlxSelfDraft, check: CheckCancelled) -> None:
        self._target = target
        self._network = network
        self._check = check
        self.capabilities = replace(target.capabilities, tree=False, shares_kv=True)
        self._is_closed = False
        self._tail: list[int] = []
        self._lazy: DeviceDraft | None = None  # of the last rollout; all but its last token follow the tail
        self._pending: tuple[int, Draft] | None = None
        self._hidden: list[Any] = []  # [1, rows, H] each, of the rows of the tail
        self._caches: list[KeyValues] = []  # in use for the tail

    @property
    def position(self) -> int:
        return self._target.position + (self._tail_length if self._target.bound is self else 0)

    @property
    def draft_limit(self) -> int:
        return max(0, min(self._space - (self.position - self._target.position), MAX_ROWS) - 1)

    def prefill(self, tokens: Sequence[int]) -> Generator[PrefillProgress | Yield, None, Scores]:
        """Run what is not held of `tokens`, and score the last row that runs.

        Raises ContextOverflow, Cancelled, BackendError.
        """
        self._sync()
        self._pending = None
        check_prompt(tokens, self.capabilities)
        base = self._target.position
        self._read_lazy()
        held = [*self._target.tokens, *self._tail]
        agreed = shared_prefix(held, tokens, len(tokens))
        agreed = max(min(base, len(tokens)), min(agreed, len(tokens) - 1))
        self.rewind(agreed)
        scores: Scores = HostScores(())
        if missing := tokens[agreed:]:
            self._require_space(len(missing))
            scores = MlxScores(self._run(mx.array([list(missing)], mx.int32), agreed - base)[-1:])
            self._tail += missing
        yield PrefillProgress(len(tokens), len(tokens))
        return scores

    def adopt(self, other: Session, n: int) -> bool:
        return False

    def forward(self, root: int, draft: Draft, *, run_ahead: bool = False) -> Scores:
        self._prepare()
        check_forward(self, root, draft, is_on_device=isinstance(draft, DeviceDraft))
        logits = self._run(chain_rows((root,), draft), len(self._tail))
        self._pending = root, draft
        return MlxScores(logits, draft=draft)

    def commit(self, path: Sequence[int]) -> None:
        self._tail += kept_tokens(self._pending, path)
        self._pending = None

    def rollout(self, tokens: Sequence[int], n: int, vocab_size: int) -> tuple[Draft, Scores]:
        self._prepare()
        check_ids(tokens, self.capabilities.vocab_size)
        self._require_space(len(tokens) + n - 1)
        first = self._run(mx.array([list(tokens)], mx.int32), len(self._tail))[-1:]
        self._tail += tokens
        at = count(len(self._tail))
        self._lazy, scores = greedy_chain(first, lambda token: self._run(token[None], next(at)), n, vocab_size)
        return self._lazy, scores

    def checkpoint(self) -> None:
        """Nothing to do: the tail can be trimmed anywhere."""

    def rewind(self, position: int) -> int:
        self._sync()
        self._pending = None
        kept = max(0, position - self._target.position)
        if kept < self._tail_length:
            if kept:
                self._read_lazy()
            self._lazy = None
            del self._tail[kept:]
        return self.position

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._drop_tail()
            if self._target.bound is self:
                self._target.bound = None

    def find_continuation(self, root: int, draft: Draft) -> Callable[[Any], Any] | None:
        """A function from this chain [1, n] to its scores [n, V] that goes on from the draft; None without one."""
        if not self._network.continues_from_layer:
            return None
        if draft is self._lazy and self._tail == [root]:
            agreed = len(draft)  # all but its last token, after the root
        else:
            self._read_lazy()
            known_tokens = [root, *draft.tokens.tolist()]
            agreed = shared_prefix(self._tail, known_tokens, len(known_tokens))
        return partial(self._continue, self._hidden_rows(agreed)) if agreed else None

    def _continue(self, hidden: Any, rows: Any) -> Any:
        """Scores [n, V] of `rows` [1, n], given `hidden` [1, m, H], the draft's last output for the first m of them.

        The caches of the draft's layers hold those m rows behind the target's position. Leaves all caches at the end of
        the n rows.
        """
        network, base, done = self._network, self._target.position, hidden.shape[1]
        if done < rows.shape[1]:
            self._rewind_caches(base + done)
            layer_pass = LayerPass(network.layers)
            with network.hooks.build(layer_pass):
                network.model(rows[:, done:], cache=self._caches)  # MLX computes only what is evaluated: these layers
            hidden = mx.concatenate([hidden, layer_pass.output], axis=1)
            self._rewind_caches(base)
        others = range(len(network.layers), len(network.hooks.layers))
        with network.hooks.build(LayerPass(others, input=hidden)):
            logits = network.model(rows, cache=self._caches)[0]
        self._rewind_caches(base + rows.shape[1])
        return logits

    def _run(self, tokens: Any, at: int) -> Any:
        """Scores [n, V] of tokens [1, n] that start `at` rows behind the target's; handed to the device.

        Leaves the caches at the target's position, also where it raises BackendError or Cancelled.
        """
        self._check()
        network, base = self._network, self._target.position
        runner = self._target.bind(self)
        if not self._caches:
            entries: list[KeyValues] = runner.caches.entries
            self._caches = [entry.extract(*network.sparse) for entry in entries] if network.sparse else entries
        layer_pass = LayerPass(network.layers)
        try:
            with map_errors(), network.hooks.build(layer_pass):
                self._rewind_caches(base + at)  # also those of skipped layers: models make masks from any cache
                logits = network.model(tokens, cache=self._caches)[0]
                mx.async_eval(logits)
        finally:
            self._rewind_caches(base)
        if network.continues_from_layer:
            if sum(hidden.shape[1] for hidden in self._hidden) > at:  # some rows were rewound
                self._hidden = [self._hidden_rows(at)] if at else []
            self._hidden.append(layer_pass.output)
        return logits

    def _hidden_rows(self, n: int) -> Any:
        """[1, n, H] the output of the draft's layers for the first rows of the tail."""
        return mx.concatenate(self._hidden, axis=1)[:, :n]

    def _rewind_caches(self, position: int) -> None:
        for each in self._caches:
            each.rewind(position)

    @property
    def _tail_length(self) -> int:
        return len(self._tail) + (len(self._lazy) - 1 if self._lazy is not None else 0)

    def _read_lazy(self) -> None:
        """Append the tokens that a rollout has left on the device."""
        lazy, self._lazy = self._lazy, None
        if lazy is not None:
            self._tail += lazy.tokens[:-1].tolist()

    def _prepare(self) -> None:
        self._sync()
        self._read_lazy()
        check_committed(self._pending)

    def _sync(self) -> None:
        """Drop the tail if the target has changed. Raises BackendError once the session is closed."""
        if self._is_closed:
            raise BackendError("the session is closed.", hint="Open another.")
        if self._target.bound is not self:
            self._drop_tail()

    def _drop_tail(self) -> None:
        self._lazy = self._pending = None
        self._tail, self._hidden, self._caches = [], [], []

    @property
    def _space(self) -> int:
        """Rows that the tail may have."""
        left = self.capabilities.context_size - self._target.position
        return min(left, SLACK) if self._network.has_windows else left

    def _require_space(self, n: int) -> None:
        if len(self._tail) + n > self._space:
            raise ContextOverflow(f"{n} drafted tokens do not fit.", hint="Report this as a bug.")


# A copy of a model whose linear layers have fewer bits, experts included; all other arrays are the model's own.


_FLOAT, _QUANTIZED = (nn.Linear, SwitchLinear), (nn.QuantizedLinear, QuantizedSwitchLinear)
_GROUPS = (64, 32, 128)  # elements that can share a scale, the preferred number first
_FLOAT_BITS = 4  # default for a copy of floating-point weights
_MIN_BITS = 2


def make_low_bit(
    model: Any, layers: Sequence[int], bits: int, progress: Callable[[float], None], check: CheckCancelled
) -> tuple[Any, int]:
    """A copy of `model` with `bits` a weight (0: half of its own), and the bytes that it takes in addition.

    Of the layers only `layers` are changed, and nothing that has so few bits already. Raises Unsupported, BackendError,
    Cancelled.
    """
    copied = _share(model)
    others = [layer for i, layer in enumerate(get_layers(copied)) if i not in layers]
    skipped = {id(module) for layer in others for module in layer.modules()}
    linears = [m for m in copied.modules() if type(m) in (*_FLOAT, *_QUANTIZED) and id(m) not in skipped]
    chosen = [(linear, count) for linear in linears if (count := _choose_bits(linear, bits))]
    if not chosen:
        raise Unsupported(
            "the model's weights have no more bits than the draft's.", hint="Use fewer bits, or layerskip."
        )
    low: dict[int, Any] = {}
    for done, (linear, count) in enumerate(chosen):
        check()
        progress(done / len(chosen))
        with map_errors():
            low[id(linear)] = _requantize(linear, count)
    modules = copied.leaf_modules()
    copied.update_modules(tree_map(lambda m: low.get(id(m), m), modules, is_leaf=nn.Module.is_module))
    mx.clear_cache()
    return copied, sum(each.weight.nbytes + each.scales.nbytes + each.biases.nbytes for each in low.values())


def _share(value: Any) -> Any:
    """A copy of a module, of the modules in it, and of the lists of them; their arrays are the same."""
    if isinstance(value, list | tuple):
        return type(value)(_share(each) for each in value)
    if not isinstance(value, dict):
        return value
    copied = copy.copy(value)  # of a module as well, which is a dictionary
    for name, each in value.items():
        copied[name] = _share(each)
    return copied


def _choose_bits(linear: Any, bits: int) -> int:
    """Bits of a layer's low-bit copy; 0 where there can be none."""
    if not _group_size(linear) or getattr(linear, "global_scale", None) is not None:
        return 0
    own = linear.bits if isinstance(linear, _QUANTIZED) else 2 * _FLOAT_BITS
    n_bits = int(bits or own // 2)
    return n_bits if _MIN_BITS <= n_bits < own else 0


def _group_size(linear: Any) -> int:
    """Elements that share a scale in a copy, as in the layer if possible; 0 where no group size fits its rows."""
    width, groups = linear.weight.shape[-1], [*_GROUPS]
    if isinstance(linear, _QUANTIZED):
        width, groups = width * 32 // linear.bits, [linear.group_size, *_GROUPS]
    return next((group for group in groups if group in _GROUPS and width % group == 0), 0)


def _requantize(linear: Any, bits: int) -> Any:
    """A module with the same matrices and biases, in `bits` a weight."""
    plain = linear
    if isinstance(linear, _QUANTIZED):
        plain = SwitchLinear(1, 1, 1, False) if isinstance(linear, QuantizedSwitchLinear) else nn.Linear(1, 1, False)
        settings = {"group_size": linear.group_size, "bits": linear.bits, "mode": linear.mode}
        plain.weight = mx.dequantize(linear.weight, linear.scales, linear.get("biases"), **settings)
        if "bias" in linear:
            plain.bias = linear.bias
    low = plain.to_quantized(_group_size(linear), bits)
    mx.eval(low.parameters())
    return low


_PROMPT, _DRAFTED = 6, 3  # tokens of the probe
_ADVICE = "Use --draft ngram, or a draft model."


class MlxSelfDraft(AttachedDraft):
    """A model as its own draft. Its sessions use their target's caches.

    model                 the target's, or a copy of it whose weights have fewer bits
    hooks                 of the layers of both
    layers                those that run, ascending
    sparse                (sink, window): tokens of context seen at its start and its end; None for all
    has_windows           whether any of its caches drops rows behind a window
    continues_from_layer  whether the target continues drafted rows after `layers`, instead of running those again: they
                          are the first ones and run unchanged
    """

    def __init__(
        self,
        runner: ModelRunner,
        hooks: LayerHooks,
        tokenizer: Tokenizer,
        method: SelfDraftSpec,
        open_session: Callable[[], MlxSession],
        progress: Callable[[float], None],
        check: CheckCancelled,
    ) -> None:
        """`runner` is any of the model's. Raises Unsupported, InvalidRequest, BackendError, Cancelled."""
        count = len(hooks.layers)
        layers = method.layers(count)
        self.tokenizer, self.name, self.extra_bytes = tokenizer, str(method), 0
        self.hooks, self.layers, self.sparse = hooks, layers, method.sparse
        self._target = self.model = runner.model
        if method.bits is not None:
            self.model, self.extra_bytes = make_low_bit(runner.model, layers, method.bits, progress, check)
        self.has_windows = any(entry.window is not None for entry in runner.caches.entries)
        is_exit = len(layers) < count and layers == tuple(range(len(layers)))
        self.continues_from_layer = is_exit and method.bits is None and method.sparse is None
        _probe(self, open_session, tokenizer.vocab_size, check)
        progress(1.0)

    def open_session(self, target: Session, check: CheckCancelled) -> SharedKVSession:
        """Raises ValueError for a session of another model."""
        target = getattr(target, "inner", target)
        if not isinstance(target, MlxSession) or target.model is not self._target:
            raise ValueError("the target is a session of another model")
        return SharedKVSession(target, self, check)

    def close(self) -> None:
        self.model = self._target
        mx.clear_cache()


def check_layers(runner: ModelRunner) -> None:
    """Whether the model's layers can be skipped. Raises Unsupported where its layers or caches do not allow it."""
    layers, entries = get_layers(runner.model), runner.caches.entries
    for is_so, reason in (
        (bool(runner.caches.recurrent), "its layers have recurrent states, which a draft cannot share"),
        (not all(isinstance(each, KeyValues) for each in entries), "it has caches that a draft cannot share"),
        (
            not len(layers) == len(entries) == len({id(layer) for layer in layers}),
            "it does not have one cache for each layer",
        ),
    ):
        if is_so:
            raise Unsupported(f"this model cannot draft for itself on MLX: {reason}.", hint=_ADVICE)


def _probe(
    network: MlxSelfDraft, open_session: Callable[[], MlxSession], vocab_size: int, check: CheckCancelled
) -> None:
    """Drafts and verifies a few tokens, to test whether a model's code works in this way. It does not judge the drafts.

    Raises Unsupported where the model fails, or where the scores of its target change. Sets `continues_from_layer` to
    False where only that fails.
    """
    try:
        reason = _find_failure(network, open_session, vocab_size, check)
    except EdgespecError as error:
        reason = f"it fails ({reason_of(error)})"
    if reason is not None:
        raise Unsupported(f"this model cannot draft for itself in this way on MLX: {reason}.", hint=_ADVICE)


def _find_failure(
    network: MlxSelfDraft, open_session: Callable[[], MlxSession], vocab_size: int, check: CheckCancelled
) -> str | None:
    tokens: list[int] = ((np.arange(_PROMPT + 1 + _DRAFTED) * 7919 + 11) % vocab_size).tolist()
    root, drafted = tokens[_PROMPT], tokens[_PROMPT + 1 :]
    plain, stepwise, target = (open_session() for _ in range(3))
    for session in (plain, stepwise, target):
        read_prompt(session, tokens[:_PROMPT])
    expected = _score_chain(plain, root, drafted)
    noise = np.abs(expected - np.stack(_score_singly(stepwise, root, drafted))).max()
    draft, rows_before = SharedKVSession(target, network, check), network.hooks.layer_rows
    single = _score_singly(draft, root, drafted)
    if network.hooks.layer_rows - rows_before != len(network.layers) * len(single):  # or they run more rows than these
        return "its layers do not run one after another"
    draft.rewind(0)
    together = _score_chain(draft, root, drafted)
    # Comparisons with NaN are false, which refuses such scores too.
    if not np.abs(together - np.stack(single)).max() < 0.25 * expected.std():
        return "the draft's scores of several tokens at once are not those of one at a time"
    draft.commit(range(len(drafted)))
    can_continue, is_same = network.continues_from_layer, False
    try:
        difference = np.abs(_score_chain(target, root, drafted) - expected).max()
        is_same = bool(difference <= max(4 * noise, 0.02 * expected.std()))
    except EdgespecError:
        if not can_continue:
            raise
    network.continues_from_layer = can_continue and is_same
    return None if is_same or can_continue else "the target's scores have changed"


def _score_singly(session: Session, root: int, drafted: Sequence[int]) -> list[Logits]:
    """[n] rows [V] after the root and each of `drafted`, which are committed one at a time."""
    rows = []
    for token in (root, *drafted):
        rows.append(session.forward(token, NO_DRAFT).logits(0))
        session.commit(())
    return rows


def _score_chain(session: Session, root: int, drafted: Sequence[int]) -> Logits:
    """[n, V] of the forward of a chain."""
    scores = session.forward(root, Draft.chain(drafted))
    return np.stack([scores.logits(i) for i in range(len(drafted) + 1)])
