"""Convert byte-level BPE vocabularies from GGUF metadata to tokenizer.json and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import click
from gguf import GGUFValueType as Value
from gguf import TokenType

from edgespec.formats.mlx_folder import read_folder
from edgespec.text.chat_template import read_template


class Field(NamedTuple):
    """One entry of a GGUF file's metadata; `items` is the type of an array's elements."""

    key: str
    value: Any
    type: Value
    items: Value | None = None


_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_level(*, use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


# llama.cpp's names of pre-tokenizers, and their spelling in tokenizer.json.
_PRE_TOKENIZERS = {
    "gpt-2": _byte_level(use_regex=True),
    "smollm": {
        "type": "Sequence",
        "pretokenizers": [{"type": "Digits", "individual_digits": True}, _byte_level(use_regex=True)],
    },
    "llama-bpe": {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": _LLAMA3}, "behavior": "Isolated", "invert": False},
            _byte_level(use_regex=False),
        ],
    },
}


def to_folder(fields: dict[str, Any]) -> dict[str, bytes]:
    """Content of tokenizer.json and tokenizer_config.json from GGUF fields. Raises click.ClickException."""
    kind, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if kind != "gpt2" or pre not in _PRE_TOKENIZERS:
        raise click.ClickException(
            f"a {kind}/{pre} vocabulary cannot be written as tokenizer.json: embed a folder instead."
        )
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    bos, eos = (fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos"))
    adds_bos = fields.get("tokenizer.ggml.add_bos_token")
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _list_added_tokens(tokens, types),
        "normalizer": None,
        "pre_tokenizer": _PRE_TOKENIZERS[pre],
        "post_processor": _prepend(tokens[bos], bos) if adds_bos and bos is not None else None,
        "decoder": _byte_level(use_regex=True),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre == "llama-bpe",
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in fields["tokenizer.ggml.merges"]],
        },
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None if bos is None else tokens[bos],
        "eos_token": None if eos is None else tokens[eos],
        "chat_template": fields.get("tokenizer.chat_template"),
    }
    return {
        "tokenizer.json": json.dumps(tokenizer, ensure_ascii=False).encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
    }


def _list_added_tokens(tokens: list[str], types: list[int]) -> list[dict[str, Any]]:
    """tokenizer.json's entries of control and user-defined tokens."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": i, "content": tokens[i], **flags, "special": kind == TokenType.CONTROL}
        for i, kind in enumerate(types)
        if kind in (TokenType.CONTROL, TokenType.USER_DEFINED)
    ]


def _prepend(token: str, id: int) -> dict[str, Any]:
    """A post-processor that adds one token before the text."""
    begin, text = {"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    other = {"Sequence": {"id": "B", "type_id": 1}}
    special = {token: {"id": token, "ids": [id], "tokens": [token]}}
    return {
        "type": "TemplateProcessing",
        "single": [begin, text],
        "pair": [begin, text, other],
        "special_tokens": special,
    }


def to_gguf(path: Path, vocab_size: int) -> list[Field]:
    """Metadata for the tokenizer of a model folder. Raises click.ClickException, InvalidModelFile."""
    from mlx_lm.utils import load_tokenizer

    from edgespec.backends.mlx.tokenizer import HfTokenizer

    folder = read_folder(path)
    if folder.vocabulary is None:
        raise click.ClickException(f"{path.name} has no tokenizer.json: embed its GGUF file instead.")
    content = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))
    pre = next((name for name, spelled in _PRE_TOKENIZERS.items() if _is_same(spelled, content["pre_tokenizer"])), None)
    if content["model"]["type"] != "BPE" or content.get("normalizer") or pre is None:
        raise click.ClickException(
            f"the tokenizer of {path.name} has no known name in llama.cpp: embed its GGUF file instead."
        )
    added = {each["id"]: each["special"] for each in content["added_tokens"]}
    kinds = {True: TokenType.CONTROL, False: TokenType.USER_DEFINED, None: TokenType.NORMAL}
    used = folder.vocabulary
    tokens = [used.get(i, f"[PAD{i}]") for i in range(vocab_size)]
    types = [int(kinds[added.get(i)] if i in used else TokenType.UNUSED) for i in range(vocab_size)]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in content["model"]["merges"]]
    tokenizer = HfTokenizer(load_tokenizer(path), vocab_size)
    found = [
        Field("model", "gpt2", Value.STRING),
        Field("pre", pre, Value.STRING),
        Field("tokens", tokens, Value.ARRAY, Value.STRING),
        Field("token_type", types, Value.ARRAY, Value.INT32),
        Field("merges", merges, Value.ARRAY, Value.STRING),
        Field("bos_token_id", tokenizer.bos, Value.UINT32),
        Field("eos_token_id", tokenizer.eos, Value.UINT32),
        Field("add_bos_token", tokenizer.add_bos, Value.BOOL),
    ]
    named = [field._replace(key=f"tokenizer.ggml.{field.key}") for field in found if field.value is not None]
    template = read_template(path)
    return named if template is None else [*named, Field("tokenizer.chat_template", template, Value.STRING)]


def _is_same(a: dict[str, Any], b: Any) -> bool:
    """Whether two pre-tokenizers split text alike; their trimming of offsets does not matter."""
    plain = [json.loads(json.dumps(each), object_hook=_drop_offsets) for each in (a, b)]
    return bool(plain[0] == plain[1])


def _drop_offsets(entry: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key != "trim_offsets"}
