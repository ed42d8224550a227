"""Random-weight DFlash, DFlash2 and DSpark heads for the embedded target as GGUF files, and their forward in numpy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edgespec.backends.llamacpp.hidden_states import Floats
from edgespec.formats.heads import HeadKind, HeadSpec
from tests.backends.mlx_dflash_heads import NumpyHead
from tests.backends.numpy_layers import read_tensors
from tests.gguf_models import TARGET, GgufBuilder

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_WIDTH, FFN = 256, (1, 3, 4, 5), 4, 2, 32, 192
DEPTH, BLOCK, MASK, DRAFT_VOCABULARY, RANK = 2, 6, 4000, 500, 16
TAPS, GROUP, CANDIDATES = 3, 16, 5  # of DFlash2


@dataclass(frozen=True)
class Dialect:
    """What heads differ in.

    markov        None for DFlash; for DSpark whether the root's row predicts
    is_causal     whether rows of a block see only those before
    is_reduced    whether it has an output matrix of its own, for a part of the vocabulary
    window        positions that the first layer sees; 0 for all
    has_sections  whether the rotary embedding has sections, as for targets that read images
    has_selector  whether it is of DFlash2
    """

    markov: bool | None = None
    is_causal: bool = False
    is_reduced: bool = False
    window: int = 0
    has_sections: bool = False
    has_selector: bool = False

    @property
    def kind(self) -> HeadKind:
        return "dflash" if self.markov is None else "dspark"

    @property
    def first(self) -> int:
        """The row that predicts the token after the root."""
        return 0 if self.markov else 1

    @property
    def spec(self) -> HeadSpec:
        return HeadSpec(
            self.kind,
            HIDDEN,
            LAYERS,
            HIDDEN,
            block_size=BLOCK,
            mask_token=MASK,
            predicts_at_root=bool(self.markov),
        )


DIALECTS = {
    "dflash": Dialect(),
    "causal": Dialect(is_causal=True),
    "reduced": Dialect(is_reduced=True),
    "window": Dialect(window=20),
    "sections": Dialect(has_sections=True),
    "dflash2": Dialect(has_selector=True),
    "dflash2 with sections": Dialect(has_selector=True, has_sections=True),
    "dspark": Dialect(markov=True),
    "dspark after the root": Dialect(markov=False),
    "dspark reduced": Dialect(markov=True, is_reduced=True),
}


def make_dflash(
    path: Path, dialect: Dialect = Dialect(), *, size: int = HIDDEN, max_id: int | None = None, **keys: int
) -> Path:
    """Write the file. `max_id` replaces an id of d2t; `keys` of the architecture replace or add whole numbers."""
    m = GgufBuilder(path, "dflash", layers=DEPTH, width=size, seed=13)
    m.attention(heads=HEADS, kv_heads=KV_HEADS, head_width=HEAD_WIDTH)
    m.writer.add_feed_forward_length(FFN)
    m.writer.add_mask_token_id(MASK)
    m.writer.add_uint32("dflash.block_size", BLOCK)
    m.writer.add_array("dflash.target_layers", list(LAYERS))
    m.writer.add_bool("dflash.attention.causal", dialect.is_causal)
    if dialect.window:
        m.writer.add_sliding_window(dialect.window)
        m.writer.add_sliding_window_pattern([True, False])
    if dialect.has_sections:
        m.writer.add_rope_dimension_sections([HEAD_WIDTH // 2, 0, 0, 0])
    for key, number in keys.items():
        m.writer.kv_data[0].pop(name := f"dflash.{key.replace('__', '.')}", None)
        m.writer.add_uint32(name, number)

    def norm(name: str, n: int) -> None:
        m.writer.add_tensor(f"{name}.weight", m.rng.uniform(0.5, 1.5, n).astype(np.float32))

    m.matrix("fc", size, len(LAYERS) * size)
    norm("enc.output_norm", size)
    norm("output_norm", size)
    for i in range(DEPTH):
        b = f"blk.{i}"
        for name in ("attn_norm", "ffn_norm"):
            norm(f"{b}.{name}", size)
        for name in ("attn_q_norm", "attn_k_norm"):
            norm(f"{b}.{name}", HEAD_WIDTH)
        m.matrix(f"{b}.attn_q", HEADS * HEAD_WIDTH, size)
        m.matrix(f"{b}.attn_k", KV_HEADS * HEAD_WIDTH, size)
        m.matrix(f"{b}.attn_v", KV_HEADS * HEAD_WIDTH, size)
        m.matrix(f"{b}.attn_output", size, HEADS * HEAD_WIDTH, gain=2.0)
        m.matrix(f"{b}.ffn_gate", FFN, size)
        m.matrix(f"{b}.ffn_up", FFN, size)
        m.matrix(f"{b}.ffn_down", size, FFN)
    rows = m.vocab_size
    if dialect.is_reduced:
        rows = DRAFT_VOCABULARY
        ids = np.sort(m.rng.permutation(m.vocab_size)[:rows]).astype(np.int64)
        ids[-1] = ids[-1] if max_id is None else max_id
        m.writer.add_tensor("d2t", ids)
        m.matrix("output", rows, size, gain=3.0)
    if dialect.markov is not None:
        m.matrix("markov_w1", m.vocab_size, RANK, gain=3.0)
        m.matrix("markov_w2", rows, RANK, gain=3.0)
        m.writer.add_bool("dflash.sample_from_anchor", dialect.markov)
        m.matrix("conf_proj", 1, HIDDEN + RANK)
        m.writer.add_tensor("conf_proj.bias", np.ones(1, np.float32))
    if dialect.has_selector:
        _add_selector(m, keys)
    m.save()
    return path


def _add_selector(m: GgufBuilder, keys: dict[str, int]) -> None:
    """Add what DFlash2 has besides; the keys that `keys` has are left out."""
    own = {"conv_kernel_size": TAPS, "conv_group_size": GROUP, "selector_rank": RANK, "selector_top_k": CANDIDATES}
    for key, number in own.items():
        if key not in keys:
            m.writer.add_uint32(f"dflash.{key}", number)
    for b in range(DEPTH):
        for part in ("attn", "ffn"):
            base = m.rng.uniform(-0.3, 0.3, (2, TAPS, HIDDEN)).astype(np.float32)
            base[:, 0] += 1
            m.writer.add_tensor(f"blk.{b}.{part}_conv_base", base)
            m.matrix(f"blk.{b}.{part}_conv_proj", 2 * TAPS * HIDDEN // GROUP, HIDDEN, gain=0.3)
    for name in ("selector_predecessor", "selector_successor"):
        m.matrix(name, m.vocab_size, RANK, gain=3.0)
    m.matrix("selector_hidden", RANK, HIDDEN)


_NAMES = {
    "enc.output_norm": "hidden_norm",
    "output_norm": "norm",
    "output": "lm_head",
    "markov_w1": "markov_head.markov_w1",
    "markov_w2": "markov_head.markov_w2",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_output": "self_attn.o_proj",
    **{f"attn_{name}": f"self_attn.{name}_proj" for name in "qkv"},
    **{f"attn_{name}_norm": f"self_attn.{name}_norm" for name in "qk"},
    **{f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}


class NumpyDflash(NumpyHead):
    """The forward pass over a block and all states of a text at once."""

    def __init__(self, path: Path, dialect: Dialect) -> None:
        target = read_tensors(TARGET)
        self.embeddings = target["token_embd.weight"].astype(np.float64)
        self.w = {"lm_head.weight": target.get("output.weight", self.embeddings)}
        for name, each in read_tensors(path).items():
            stem, _, part = name.rpartition(".")
            prefix, _, inner = stem.rpartition(".") if stem.startswith("blk.") else ("", "", stem)
            self.w[f"{prefix.replace('blk', 'layers')}.{_NAMES.get(inner, inner)}.{part}".lstrip(".")] = each
        self.shape, self.rows = (HEADS, KV_HEADS, HEAD_WIDTH), [MASK] * BLOCK
        self.windows, self.is_causal = (dialect.window or None, None), (dialect.is_causal, dialect.is_causal)
        self._dialect = dialect

    def logits(self, features: Floats, root: int, best: Sequence[int] = ()) -> Floats:
        """[BLOCK - first, V] for the positions after `root`, whose position is n; `features` [n, layers * H].

        `best`: for DSpark and DFlash2, the tokens that the rows before are taken to have chosen. Logits of tokens
        without a row, and of those that are no candidates, are -inf.
        """
        output = self.output(features.astype(np.float64), root)[self._dialect.first :]
        z = self.scores(output)
        if self._dialect.has_selector:
            z = np.stack([self._select(*each) for each in zip(output, z, [root, *best], strict=False)])
        if self._dialect.markov is not None:
            z = z + np.stack([self.bias(token) for token in [root, *best][: len(z)]])
        if "d2t" not in self.w:
            return np.asarray(z, np.float32)
        scattered = np.full((len(z), len(self.embeddings)), -np.inf, np.float32)
        scattered[:, self.w["d2t"]] = z
        return scattered

    def _select(self, output: Floats, scores: Floats, before: int) -> Floats:
        """[V] the scores of a row of DFlash2 that follows the token `before`."""
        candidates = np.argsort(scores)[-CANDIDATES:]
        gate = self.w["selector_hidden.weight"] @ output * self.w["selector_predecessor.weight"][before]
        found = np.full(len(scores), -np.inf)
        found[candidates] = scores[candidates] + self.w["selector_successor.weight"][candidates] @ gate
        return found
