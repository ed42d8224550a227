"""A GGUF model that writes given texts. Which of them, the words in its prompt decide: it has to be read.

It is a llama of one layer whose weights are set, not trained. A text is a chain of tokens that nothing else uses, and
each token's vector points at the next one. The first one follows from attention to the words of the script: a later
word outweighs earlier ones, and where there is none the first text begins. Everything else is real: templates,
tokens of prompts, caches, sampling and the reading of answers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import numpy.typing as npt

CONTEXT = 131_072
_WIDTH = 64
_WORDS, _TEXTS, _CHAIN, _ONE = 0, 8, 16, _WIDTH - 1  # where the dimensions of each kind start; all tokens have the last
_MAX_STEPS = _TEXTS - _WORDS

Weights = npt.NDArray[np.floating[Any]]


class Step(NamedTuple):
    """What the model writes where its prompt has `word` and the word of no later step."""

    word: str
    text: str


def write_scripted_model(
    path: Path, vocabulary: Path, template: str, steps: Sequence[Step], *, control: Sequence[str] = ()
) -> None:
    """Write the model. The word of the first step counts as there.

    vocabulary  a GGUF file whose tokens spell bytes as GPT-2's do
    control     control tokens of the template, which the vocabulary may lack
    """
    assert 0 < len(steps) <= _MAX_STEPS
    known = _read_vocabulary(vocabulary)
    tokens, kinds = known["tokens"], known["token_type"]
    words = [step.word for step in steps[1:]]
    lacking = [each for each in control if each not in tokens]
    chains = list(_split_apart([step.text for step in steps], {*tokens, *lacking, *words}))
    pieces = [_spell(piece) for chain in chains for piece in chain]
    first_word = len(tokens) + len(lacking)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(known["pre"])
    writer.add_token_list([*tokens, *lacking, *words, *pieces])
    kind = gguf.TokenType
    more = [kind.CONTROL] * len(lacking) + [kind.USER_DEFINED] * len(words) + [kind.NORMAL] * len(pieces)
    writer.add_token_types([*kinds, *more])
    writer.add_token_merges(known["merges"])
    writer.add_bos_token_id(known["bos_token_id"])
    writer.add_eos_token_id(known["eos_token_id"])
    writer.add_add_bos_token(False)
    writer.add_chat_template(template)
    _add_shape(writer)
    for name, weights in _make_weights(first_word, [len(chain) for chain in chains], known["eos_token_id"]):
        writer.add_tensor(f"{name}.weight", weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _read_vocabulary(path: Path) -> dict[str, Any]:
    prefix = "tokenizer.ggml."
    fields = gguf.GGUFReader(path).fields
    known = {name.removeprefix(prefix): each.contents() for name, each in fields.items() if name.startswith(prefix)}
    assert known["model"] == "gpt2"
    return known


def _split_apart(texts: Sequence[str], taken: set[str]) -> Iterator[list[str]]:
    """The pieces of each text, about a word each: no spelling of a token is there twice."""
    taken = set(taken)
    for text in texts:
        pieces: list[str] = []
        rest = ""
        for word in re.findall(r"\s*\w+|\s*[^\w\s]+|\s+", text):
            rest += word
            if _spell(rest) not in taken:
                pieces.append(rest)
                taken.add(_spell(rest))
                rest = ""
        while rest and _spell(rest) in taken:
            taken.discard(_spell(pieces[-1]))
            rest = pieces.pop() + rest
        if rest:
            pieces.append(rest)
            taken.add(_spell(rest))
        yield pieces


def _spell(text: str) -> str:
    """A text as GPT-2's vocabularies spell its bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return "".join(chr(256 + others.index(byte)) if byte in others else chr(byte) for byte in text.encode())


def _add_shape(writer: gguf.GGUFWriter) -> None:
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(_WIDTH)
    writer.add_block_count(1)
    writer.add_feed_forward_length(_WIDTH)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_rope_dimension_count(_WIDTH)
    writer.add_rope_freq_base(1e30)  # with which the last numbers of a head are the same at every position
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)


def _make_weights(first_word: int, lengths: Sequence[int], end: int) -> Iterator[tuple[str, Weights]]:
    """Tensors by name, [rows, columns]. Their numbers keep all choices apart by 15 nats or more, behind 131,072 tokens.

    first_word  the token of the second step's word, as the first has none; the chains are behind the words
    lengths     of the chains, in tokens
    end         the token that ends a text
    """
    n_words, first_piece = len(lengths) - 1, first_word + len(lengths) - 1
    size = first_piece + sum(lengths)
    rng = np.random.default_rng(0)
    chain = rng.standard_normal((sum(lengths), _ONE - _CHAIN)).astype(np.float32)
    chain /= np.linalg.norm(chain, axis=1, keepdims=True)
    embeddings, output = np.zeros((2, size, _WIDTH), np.float32)  # a norm brings each vector to the length 8
    embeddings[:, _ONE] = 2
    for i in range(n_words):
        embeddings[first_word + i, _WORDS + 1 + i] = 2
    embeddings[first_piece:, _CHAIN:_ONE] = 8 * chain
    begin = 0
    for i, length in enumerate(lengths):
        output[first_piece + begin, _TEXTS + i] = 20
        for at in range(begin, begin + length):
            follower = end if at + 1 == begin + length else first_piece + at + 1
            output[follower, _CHAIN:_ONE] += 20 * chain[at]
        begin += length
    query, key, value, out = np.zeros((4, _WIDTH, _WIDTH), np.float32)
    query[_ONE, _ONE] = 8
    key[_ONE, _WORDS : _WORDS + _MAX_STEPS] = 4 * np.arange(_MAX_STEPS)  # later words outweigh earlier ones
    value[_TEXTS, _ONE] = 1 / 8  # what is no word stands for the first text
    for i in range(1, _MAX_STEPS):
        value[_TEXTS + i, _WORDS + i] = 1 / 5.7
        value[_TEXTS, _WORDS + i] = -1 / 8
    np.fill_diagonal(out, 4)
    half = np.float16
    yield "token_embd", embeddings.astype(half)
    yield "output", output.astype(half)
    yield "output_norm", np.ones(_WIDTH, np.float32)
    for name in ("attn_norm", "ffn_norm"):
        yield f"blk.0.{name}", np.ones(_WIDTH, np.float32)
    for name, weights in (("attn_q", query), ("attn_k", key), ("attn_v", value), ("attn_output", out)):
        yield f"blk.0.{name}", weights.astype(half)
    for name in ("ffn_gate", "ffn_up", "ffn_down"):
        yield f"blk.0.{name}", np.zeros((_WIDTH, _WIDTH), half)
