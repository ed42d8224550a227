"""Prompts that are not chats: gaps by the markers of a vocabulary, and token ids."""

from __future__ import annotations

import json
from contextlib import closing
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from edgespec.backends import open_model
from edgespec.backends.options import LoadOptions
from edgespec.backends.toy import load as load_toy
from edgespec.engine.events import Gap, TokenPrompt
from edgespec.engine.prompts import PromptEncoder
from edgespec.errors import InvalidRequest, PromptTooLong
from edgespec.text.chat_template import Message
from tests.gguf_models import TARGET
from tests.text.templates import FAMILIES

MARKERS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")


class TrainedTokenizer:
    """A byte-level BPE of the `tokenizers` package. Texts of these tests are ASCII."""

    bos: int | None = 0
    eos: int | None = 0
    add_bos = True
    end_of_generation = frozenset([0])

    def __init__(self, bpe: tokenizers.Tokenizer) -> None:
        self.bpe = bpe
        self.special = {i for i, added in bpe.get_added_tokens_decoder().items() if added.special}
        self.control_tokens = self.special
        self.decoder = decoders.ByteLevel()
        self.vocab_size = bpe.get_vocab_size()

    def encode(self, text: str, *, parse_special: bool) -> list[int]:
        self.bpe.encode_special_tokens = not parse_special
        ids: list[int] = self.bpe.encode(text, add_special_tokens=False).ids
        return ids

    def piece(self, token: int) -> bytes:
        return b"" if token in self.special else self.decoder.decode([self.special_text(token)]).encode()

    def special_text(self, token: int) -> str:
        text = self.bpe.id_to_token(token)
        assert text is not None
        return text


def make_encoder(*special: str) -> tuple[PromptEncoder, TrainedTokenizer]:
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(special_tokens=["<s>", *special], initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(["def f(x):\n    return x\n"], trainer)
    target: Any = load_toy("tree", LoadOptions(context_size=32))
    target.tokenizer = TrainedTokenizer(bpe)
    return PromptEncoder(target), target.tokenizer


def test_a_gap_is_written_with_the_markers_of_the_vocabulary() -> None:
    encoder, tokenizer = make_encoder(*MARKERS)
    tokens = encoder.encode(Gap("def f(x):", "return x"), {}).tokens
    read = [tokenizer.special_text(token) if not tokenizer.piece(token) else "" for token in tokens]
    assert [text for text in read if text] == ["<s>", *MARKERS]
    assert read[1] == MARKERS[0] and read[-1] == MARKERS[2]
    assert b"".join(map(tokenizer.piece, tokens)) == b"def f(x):return x"
    codestral, tokenizer = make_encoder("[PREFIX]", "[SUFFIX]")
    tokens = codestral.encode(Gap("{x}", "return"), {}).tokens
    read = [tokenizer.special_text(token) if not tokenizer.piece(token) else "" for token in tokens]
    assert (read[1], [text for text in read if text]) == ("[SUFFIX]", ["<s>", "[SUFFIX]", "[PREFIX]"])
    assert b"".join(map(tokenizer.piece, tokens)) == b"return{x}"
    with pytest.raises(InvalidRequest, match="no markers for a suffix"):
        make_encoder()[0].encode(Gap("a", "b"), {})


def test_token_ids_are_read_as_they_stand() -> None:
    encoder, tokenizer = make_encoder()
    assert encoder.encode(TokenPrompt((5, 6)), {}).tokens == [5, 6]
    for wrong in ((), (-1,), (1, tokenizer.vocab_size)):
        with pytest.raises(InvalidRequest, match="token ids has ids below"):
            encoder.encode(TokenPrompt(wrong), {})
    assert len(encoder.encode(TokenPrompt((1,) * 32), {}).tokens) == 32, "all that the context holds"
    with pytest.raises(PromptTooLong, match="has 33 tokens, the context holds 32") as refusal:
        encoder.encode(TokenPrompt((1,) * 33), {})
    assert refusal.value.hint == "Shorten it, or set a larger --ctx."


def test_what_was_counted_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, tokenizer = make_encoder()
    read: list[str] = []
    encode = tokenizer.encode

    def note(text: str, *, parse_special: bool) -> list[int]:
        read.append(text)
        return encode(text, parse_special=parse_special)

    monkeypatch.setattr(tokenizer, "encode", note)
    chat = (Message("user", "def f"),)
    assert encoder.count(chat, {}) == encoder.count(chat, {}) == len(encoder.encode(chat, {}).tokens)
    assert read == ["def f"]
    encoder.encode(chat, {})
    encoder.count(chat, {"a": 1})
    encoder.encode(chat, {})
    assert len(read) == 4, "another time, and with other variables"


@pytest.mark.parametrize("tagged", [False, True], ids=["JSON", "tags"])
def test_what_tools_have_said_is_quoted_as_a_call_does(tagged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = load_toy("tree", LoadOptions())
    monkeypatch.setattr(model, "chat_template", FAMILIES["qwen3-coder" if tagged else "hermes"])
    encoder = PromptEncoder(model)
    shown = '   1\tif x == "a":\n   2\t    y = 1: 2\n'
    plain = 'if x == "a":\n    y = 1: 2\n'
    chat = (Message("tool", shown), Message("user", "1: go on"), Message("tool", "ok"), Message("tool", shown))
    quoted = bytes(encoder.quote(chat)).decode()
    assert quoted == (plain if tagged else json.dumps(plain)[1:-1]) + "ok"
    assert encoder.quote("1: raw") == encoder.quote(chat[1:2]) == []


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_a_turn_cannot_be_forged(role: str) -> None:
    """What messages have of a control token's spelling is text; in a raw prompt it is the token."""
    model = open_model("llamacpp", TARGET, LoadOptions(context_size=512, threads=1))
    with closing(model):
        tokenizer = model.tokenizer
        (end, *_) = sorted(tokenizer.end_of_generation)
        forged = f"a{tokenizer.special_text(end)}b"
        encoder = PromptEncoder(model)
        tokens = encoder.encode((Message("user", "hello"), Message(role, forged)), {}).tokens
        assert end not in tokens[1:]
        assert forged.encode() in b"".join(map(tokenizer.piece, tokens))
        plain = (Message("user", "hello"), Message(role, "no markers, <b>"))
        assert encoder.encode(plain, {}).tokens == encoder.read(encoder.render(plain))
        assert end in encoder.encode(forged, {}).tokens[1:]
