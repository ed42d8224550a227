"""Memory estimates from a GGUF header or a folder's config, and the check against free memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from functools import reduce
from operator import add

from edgespec.backends import FileBackend, device_memory
from edgespec.backends.features import MAX_KEPT
from edgespec.backends.options import STATE_SNAPSHOTS
from edgespec.errors import BackendUnavailable, DoesNotFit
from edgespec.formats.ggml_types import GGML_NAMES
from edgespec.formats.gguf import Header
from edgespec.formats.head_file import ModelMetadata
from edgespec.formats.heads import HeadSpec
from edgespec.formats.mlx_folder import Folder
from edgespec.machines.memory import Memory, host_memory
from edgespec.units import gib

# llama.cpp's n_ubatch: the rows of a graph, which determine its scratch memory.
MICRO_BATCH = 512
_READ_PAIRS = ("eagle3", "eagle", "mtp", "hydra")  # heads that on MLX keep a state of each position
_KEEP_STATES = ("qwen35", "qwen35moe", "nemotron_h", "nemotron_h_moe")  # llama.cpp's llm_arch_supports_rs_rollback
_WITHOUT_CACHE = ("medusa", "gemma4-assistant")  # heads that have no keys and values of their own


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes of a model: weights, KV cache of the whole context, scratch memory, and recurrent states, which do not
    depend on the context.
    """

    weights: int
    kv: int
    compute: int
    states: int = 0

    @property
    def total(self) -> int:
        return sum(astuple(self))

    def __add__(self, other: MemoryEstimate) -> MemoryEstimate:
        return MemoryEstimate(*map(add, astuple(self), astuple(other)))

    def split(self, n: int) -> MemoryEstimate:
        """The estimate for one of `n` ranks. Weights are divided by `n`, although every rank has the embeddings and the
        output matrix.
        """
        return MemoryEstimate(self.weights // n, self.kv // n, self.compute, self.states // n)


@dataclass(frozen=True, slots=True)
class Fit:
    """The result of a memory check: tokens of context, KV caches of that size, and bytes.

    draft       the memory of draft models and heads
    tree_cache  the memory of one more cache, for a text that is alone; see LoadOptions
    own         if workers share the target: this machine's part of `memory`, and its share of the target
    """

    context: int
    caches: int
    target: MemoryEstimate
    draft: MemoryEstimate | None
    memory: Memory
    own: tuple[Memory, float] | None = None
    tree_cache: MemoryEstimate | None = None

    @property
    def needed(self) -> int:
        """Bytes of target, draft and the cache for trees together."""
        return sum(each.total for each in (self.target, self.draft, self.tree_cache) if each is not None)

    @property
    def headroom(self) -> int:
        """Free bytes after loading; negative if the models do not fit."""
        return self.memory.usable - self.needed

    @property
    def needed_here(self) -> int:
        """Bytes that this machine takes: the drafts, the cache for trees, and the target or its share of it."""
        share = 1.0 if self.own is None else self.own[1]
        return self.needed - self.target.total + int(share * self.target.total)

    @property
    def own_headroom(self) -> int:
        """Free bytes of this machine after loading its share of the target, and the drafts; 0 without workers."""
        return 0 if self.own is None else self.own[0].usable - self.needed_here

    @property
    def fits(self) -> bool:
        """Tells whether there is memory for all, here and on the workers."""
        return self.headroom >= 0 and self.own_headroom >= 0

    def kv_for(self, tokens: int) -> int:
        """Bytes of the KV caches of target and draft for `tokens` tokens of one slot."""
        kv = self.target.kv + (self.draft.kv if self.draft else 0)
        return kv * tokens // (self.context * self.caches)


def read_memory(backend: FileBackend, devices: Sequence[str] | None = None) -> Memory:
    """The memory of this machine and of the runtime's `devices`, None for all; without them if the runtime is not
    installed. Raises InvalidRequest for a device that there is not.
    """
    try:
        return host_memory(device_memory(backend, devices))
    except BackendUnavailable:
        return host_memory()


def shares_context(model: ModelMetadata) -> bool:
    """Tells whether llama.cpp can keep several sequences of the model in one context, as its header says."""
    separate = (".sliding_window", ".ssm.", ".shortconv.", ".wkv.")
    return isinstance(model, Header) and not any(part in key for key in model.metadata for part in separate)


def estimate_memory(
    model: ModelMetadata,
    context: int,
    kv_type: str = "f16",
    caches: int = 1,
    *,
    flash: bool = True,
    together: bool = False,
) -> MemoryEstimate:
    """Estimate a model's memory with `caches` KV caches of `context` tokens.

    `together`: all caches are in one llama.cpp context; otherwise each has its own scratch memory. `flash`: with flash
    attention.

    Weights are the tensors' bytes. llama.cpp maps them from the file, but they must fit in RAM to be fast. MLX on a CPU
    widens half precision and takes up to twice as much.
    For llama.cpp, the KV cache counts every attention layer at full length, since it does not shorten sliding windows;
    latent attention (DeepSeek) takes less than this. For MLX, sliding windows count at their own size.
    Scratch memory is an estimate: f32 rows of a micro-batch for logits, activations and the feed-forward layer, and an
    f16 mask over the context. Measured: 9.0 MiB for an estimate of 12.5 (6M pair, 2,048 tokens), 71 MiB for an estimate
    of 104 (Llama 2 7B, 4,096 tokens). Without flash attention come the scores of a layer.
    """
    kv = kv_bytes(model, context, kv_type)
    if isinstance(model, Folder):
        rows = (model.integer("vocab_size") or 0) + 2 * (model.integer("hidden_size") or 0)
        rows += model.integer("intermediate_size") or 0
    else:
        rows = model.own("vocab_size") or len(model.tokens)
        rows += 2 * (model.own("embedding_length") or 0) + max(model.per_block("feed_forward_length") or (0,))
    graph = 4 * MICRO_BATCH * rows + (0 if flash else score_bytes(model, context))
    compute = (1 if together else caches) * graph + caches * 2 * MICRO_BATCH * context
    return MemoryEstimate(model.weight_bytes, caches * kv, compute, caches * state_bytes(model))


def score_bytes(model: ModelMetadata, context: int) -> int:
    """Bytes of one layer's scores, which llama.cpp holds without flash attention: an f32 for each head and each pair of
    a row of the micro-batch and a token of the context. 0 for a folder.
    """
    heads = () if isinstance(model, Folder) else model.per_block("attention.head_count")
    return 4 * MICRO_BATCH * max(heads or (), default=0) * context


def kv_bytes(header: ModelMetadata, context: int, kv_type: str = "f16") -> int:
    """Bytes of the KV cache at `context` tokens with elements of `kv_type`."""
    bits = GGML_NAMES[kv_type.upper()].bits
    if isinstance(header, Folder):
        return math.ceil(header.kv_elements(context) * bits / 8)
    kv_heads = header.per_block("attention.head_count_kv") or header.per_block("attention.head_count") or ()
    every = header.own("full_attention_interval") or 1  # other layers of a hybrid model have no attention
    n_heads = sum(count for block, count in enumerate(kv_heads, start=1) if block % every == 0)
    return math.ceil(n_heads * _head_elements(header) * context * bits / 8)


def state_bytes(model: ModelMetadata) -> int:
    """Bytes of the recurrent states of one cache on llama.cpp, which holds several if it can go back to them; 0 for
    a folder.
    """
    if isinstance(model, Folder):
        return 0
    state, inner, window, groups = (
        model.own(f"ssm.{key}") or 0 for key in ("state_size", "inner_size", "conv_kernel", "group_count")
    )
    layers = {tensor.block for tensor in model.tensors if ".ssm_" in tensor.name}
    n_kept = 1 + STATE_SNAPSHOTS * (model.architecture in _KEEP_STATES)
    return 4 * n_kept * len(layers) * (state * inner + max(0, window - 1) * (inner + 2 * groups * state))


def _head_elements(header: Header) -> int:
    most = max(header.per_block("attention.head_count") or (), default=0)
    width = (header.own("embedding_length") or 0) // most if most else 0
    stated = header.own("attention.key_length"), header.own("attention.value_length")
    return sum(width if each is None else each for each in stated)


def estimate_head(
    model: ModelMetadata, head: HeadSpec, context: int, kv_type: str = "f16", caches: int = 1
) -> MemoryEstimate:
    """Estimate what a trained head adds to its target, with `caches` KV caches of `context` tokens.

    `model` describes the file of the head. Weights in the target's own file count with the target. `kv` holds the keys
    and values of the head's layers and, on MLX, a half-precision state of each position. Scratch memory includes the
    hidden states that wait for the head, of 2,048 positions at most, which llama.cpp gives in single precision.
    """
    bits = GGML_NAMES[kv_type.upper()].bits
    on_mlx = isinstance(model, Folder)
    if isinstance(model, Folder):
        inner = model.config.get("transformer_layer_config")
        model = replace(model, config={**model.config, **(inner if isinstance(inner, dict) else {})})
    kv = math.ceil(_count_head_elements(model, head) * context * bits / 8)
    if on_mlx and head.kind in _READ_PAIRS:
        kv += 2 * head.size * context
    waiting = min(context, MAX_KEPT) * head.hidden_size * max(len(head.layers or ()), 1) * (2 if on_mlx else 4)
    compute = estimate_memory(model, context, kv_type, caches).compute + caches * waiting
    return MemoryEstimate(0 if head.in_target else model.weight_bytes, caches * kv, compute)


def _count_head_elements(model: ModelMetadata, head: HeadSpec) -> int:
    """Elements of keys and values at one position, in all layers of a head."""
    if head.kind in _WITHOUT_CACHE:
        return 0
    has_several = head.kind in ("dflash", "dspark")
    if isinstance(model, Folder):
        layers = model.integer("num_hidden_layers") if has_several else None
        return (layers or 1) * model.layer_kv_elements
    layers = model.own("block_count") if has_several else model.own("nextn_predict_layers")
    kv_heads = model.per_block("attention.head_count_kv") or model.per_block("attention.head_count") or (0,)
    return (layers or 1) * kv_heads[-1] * _head_elements(model)


def check_fit(
    target: ModelMetadata,
    drafts: Sequence[tuple[ModelMetadata, HeadSpec | None]],
    *,
    context: int,
    memory: Memory,
    own: tuple[Memory, float] | None = None,
    kv_type: str = "f16",
    caches: int = 1,
    flash: bool = True,
    together: bool = False,
    ranks: int = 1,
    force: bool = False,
) -> Fit:
    """Estimate target and drafts and compare with `memory`. Raises DoesNotFit unless `force`.

    `drafts` are draft models, and trained heads with what their files say. `own` is for a target that workers share:
    the part of `memory` on this machine, into which the drafts and this share of the target have to fit.
    `caches`, `context`, `flash` and `together` as in `estimate_memory`; a draft has a context for each cache. The
    target is split among `ranks` machines, of which this is one.
    """
    sizes = (context, kv_type, caches)
    added = [
        estimate_head(model, head, *sizes) if head else estimate_memory(model, *sizes, flash=flash)
        for model, head in drafts
    ]
    price = estimate_memory(target, *sizes, flash=flash, together=together).split(ranks)
    fit = Fit(context, caches, price, reduce(add, added) if added else None, memory, own)
    if force or fit.fits:
        return fit
    if own is not None and fit.own_headroom < 0:
        raise _own_part_error(fit, *own)
    cache = f"its KV cache for {context:,} tokens {gib(price.kv)}"
    parts = f"target {gib(price.weights)}, {cache}, scratch {gib(price.compute)}"
    if fit.draft:
        parts += f", draft with its KV cache {gib(fit.draft.total)}"
    raise DoesNotFit(
        f"{target.name} needs {gib(fit.needed)} and {_say_usable(memory)} ({parts}).",
        hint=f"Try {'--draft ngram or layerskip:2, ' if drafts else ''}a smaller --ctx or quantisation, or --force.",
    )


def _own_part_error(fit: Fit, own: Memory, share: float) -> DoesNotFit:
    """The error if the drafts and `share` of the target take more than `own`, this machine's memory."""
    drafts = f", the drafts {gib(fit.draft.total)}" if fit.draft else ""
    return DoesNotFit(
        f"on this machine its layers need {gib(int(share * fit.target.total))}{drafts}, and {_say_usable(own)}.",
        hint=f"Try {'--draft ngram, ' if fit.draft else ''}a smaller --ctx, workers with more memory, fewer"
        " --gpu-layers, or --force.",
    )


def _say_usable(memory: Memory) -> str:
    if memory.usable != memory.limit:
        return f"{gib(memory.usable)} are free"
    own = f", beside {memory.process // 2**20} MiB for the process itself" if memory.process else ""
    return f"{gib(memory.usable)} are allowed{own}"
