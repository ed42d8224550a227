"""Small random llamas with the vocabulary of a GGUF file, for llama.cpp and for MLX."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

WIDTH, LAYERS, HEADS, KV_HEADS, FFN = 32, 1, 2, 1, 64
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = range(1, 7)  # types of tokens
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's
_PREFIX = "tokenizer.ggml."
Fields = dict[str, Any]


def read_vocabulary(path: Path) -> Fields:
    """The fields of the tokenizer, without `tokenizer.ggml.` before their names."""
    found = gguf.GGUFReader(path).fields.items()
    return {name.removeprefix(_PREFIX): field.contents() for name, field in found if name.startswith(_PREFIX)}


def write_gguf(vocabulary: Path, path: Path, template: str | None = None, seed: int = 0) -> None:
    """A llama whose tokenizer is copied as it is."""
    writer = gguf.GGUFWriter(path, "llama")
    for name, field in gguf.GGUFReader(vocabulary).fields.items():
        if name.startswith(_PREFIX):
            kind = field.types[0]
            is_list = kind == gguf.GGUFValueType.ARRAY
            writer.add_key_value(name, field.contents(), kind, field.types[1] if is_list else None)
    if template is not None:
        writer.add_chat_template(template)
    n = len(read_vocabulary(vocabulary)["tokens"])
    writer.add_vocab_size(n)
    writer.add_context_length(1024)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_file_type(0)
    for name, weights in _draw_weights(n, seed):
        writer.add_tensor(name, weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _draw_weights(n: int, seed: int) -> Iterator[tuple[str, Any]]:
    rng = np.random.default_rng(seed)

    def matrix(name: str, rows: int, columns: int, gain: float = 1.0) -> tuple[str, Any]:
        weights = rng.standard_normal((rows, columns), dtype=np.float32) * np.float32(gain / np.sqrt(columns))
        return f"{name}.weight", weights.astype(np.float16)

    one, kv_width = np.ones(WIDTH, np.float32), WIDTH // HEADS * KV_HEADS
    yield matrix("token_embd", n, WIDTH)
    yield matrix("output", n, WIDTH, gain=3.0)
    yield "output_norm.weight", one
    for i in range(LAYERS):
        for name in ("attn_norm", "ffn_norm"):
            yield f"blk.{i}.{name}.weight", one
        for name, rows in (("attn_q", WIDTH), ("attn_k", kv_width), ("attn_v", kv_width), ("attn_output", WIDTH)):
            yield matrix(f"blk.{i}.{name}", rows, WIDTH)
        yield matrix(f"blk.{i}.ffn_gate", FFN, WIDTH)
        yield matrix(f"blk.{i}.ffn_up", FFN, WIDTH)
        yield matrix(f"blk.{i}.ffn_down", WIDTH, FFN)


def write_mlx(vocabulary: Path, folder: Path, template: str | None = None, seed: int = 0) -> None:
    """A model folder, whose tokenizer has the same tokens and merges; texts are split before merging as GPT-2 does."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.models.llama import Model, ModelArgs

    fields = read_vocabulary(vocabulary)
    n, eos = len(fields["tokens"]), fields["eos_token_id"]
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "intermediate_size": FFN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": WIDTH // HEADS,
        "rms_norm_eps": 1e-5,
        "vocab_size": n,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "eos_token_id": eos,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": fields["tokens"][eos]}
    names |= {} if template is None else {"chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    _make_tokenizer(fields).save(str(folder / "tokenizer.json"))
    mx.random.seed(seed)
    model = Model(ModelArgs.from_dict(config))
    model.lm_head.weight = model.lm_head.weight * 10
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})


def _make_tokenizer(fields: Fields) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

    tokens, kinds, is_bytes = fields["tokens"], fields["token_type"], fields["model"] == "gpt2"
    ids = {token: i for i, token in enumerate(tokens)}
    merges = _read_merges(fields, ids) if "merges" in fields else _derive_merges(fields, ids)
    if is_bytes:
        made = Tokenizer(models.BPE(ids, merges))
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
    else:
        unknown = tokens[kinds.index(_UNKNOWN)] if _UNKNOWN in kinds else None
        made = Tokenizer(models.BPE(ids, merges, unk_token=unknown, byte_fallback=True, fuse_unk=True))
        prefix = [normalizers.Prepend(_SPACE)] if fields.get("add_space_prefix", True) else []
        made.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
        made.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    added = [(token, kind) for token, kind in zip(tokens, kinds, strict=True) if kind in (_CONTROL, _USER)]
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token, k in added if k == _CONTROL])
    made.add_tokens([AddedToken(token, special=False, normalized=False) for token, k in added if k == _USER])
    return made


def _read_merges(fields: Fields, ids: dict[str, int]) -> list[tuple[str, str]]:
    pairs = (merge.split(" ", 1) for merge in fields["merges"])
    return [(left, right) for left, right in pairs if left in ids and right in ids and left + right in ids]


def _derive_merges(fields: Fields, ids: dict[str, int]) -> list[tuple[str, str]]:
    """SentencePiece merges the pair whose result has the highest score."""
    scored: list[tuple[float, tuple[str, str]]] = []
    for token, kind, score in zip(fields["tokens"], fields["token_type"], fields["scores"], strict=True):
        if kind == _NORMAL:
            halves = ((token[:i], token[i:]) for i in range(1, len(token)))
            scored += [(-score, pair) for pair in halves if pair[0] in ids and pair[1] in ids]
    return [pair for _, pair in sorted(scored, key=lambda each: each[0])]
