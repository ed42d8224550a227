"""Vocabularies of target and draft are compared by one rule, from headers and from loaded tokenizers."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from edgespec.backends import BackendName, open_model, open_tokenizer
from edgespec.backends.options import LoadOptions
from edgespec.formats.gguf import Header
from edgespec.formats.gguf_validate import read_file
from edgespec.models.tokenizer_compat import find_tokenizer_mismatch, identify_tokenizer
from tests.formats.ggufs import write_gguf
from tests.gguf_models import DRAFT, REPOSITORY

TOKENS = ["<s>", "</s>", "a", "b", "c"]


def header(folder: Path, name: str, **changes: object) -> Header:
    folder.mkdir(exist_ok=True)
    return read_file(write_gguf(folder / name, **{"tokens": TOKENS, **changes}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"tokens": ["<s>", "</s>", "a", "x", "c"]}, "token 3 is 'b' in the target and 'x' in the draft"),
        ({"tokens": ["<s>", "</s>", "a", "b\u200b", "c"]}, "token 3 is 'b' in the target and 'b\\u200b' in the draft"),
        ({"model": "rwkv"}, "the target's tokenizer is 'gpt2', the draft's is 'rwkv'"),
        ({"bos": 2}, "the first token (BOS) is id 0 in the target and id 2 in the draft"),
        ({"eos": 3}, "the last token (EOS) is id 1 in the target and id 3 in the draft"),
        ({"add_bos": False}, "the target starts every text with a BOS token and the draft does not"),
        ({"add_bos": None, "eos": None}, None),
        ({"tokens": [*TOKENS, "d"]}, "only the draft has token 5, 'd': 6 tokens against 5"),
        ({"tokens": TOKENS[:4]}, "only the target has token 4, 'c': 5 tokens against 4"),
        ({"tokens": [*TOKENS, "[PAD5]", "<|reserved_special_token_1|>", "<unused9>"]}, None),
        ({"tokens": [*TOKENS, "d", "e"], "types": [1] * 5 + [5, 5]}, None),
        ({"tokens": [*TOKENS, "<image>"], "types": [1] * 5 + [3]}, None),
        ({"tokens": [*TOKENS, "[PAD5]", "e"]}, "only the draft has token 6, 'e': 7 tokens against 5"),
    ],
)
def test_the_first_difference_of_two_headers(tmp_path: Path, changes: dict[str, object], reason: str | None) -> None:
    target, draft = header(tmp_path, "t.gguf"), header(tmp_path, "d.gguf", **changes)
    assert find_tokenizer_mismatch(target, draft) == reason
    if reason is None:
        assert find_tokenizer_mismatch(draft, target) is None


@dataclass(frozen=True)
class Loaded:
    """A loaded tokenizer; ids of `control` add no text."""

    tokens: tuple[str, ...] = tuple(TOKENS)
    control: frozenset[int] = frozenset({0, 1})
    bos: int | None = 0
    add_bos: bool = True
    eos: int | None = 1
    end_of_generation: frozenset[int] = frozenset({1})

    @property
    def vocab_size(self) -> int:
        return len(self.tokens)

    @property
    def control_tokens(self) -> frozenset[int]:
        return self.control

    def encode(self, text: str, *, parse_special: bool) -> list[int]:
        raise NotImplementedError

    def piece(self, token: int) -> bytes:
        return b"" if token in self.control else self.tokens[token].encode()

    def special_text(self, token: int) -> str:
        return self.tokens[token]


@pytest.mark.parametrize(
    ("draft", "reason"),
    [
        (Loaded(), None),
        (Loaded(("<s>", "</s>", "a", "x", "c")), "token 3 is 'b' in the target and 'x' in the draft"),
        (Loaded(bos=2), "the first token (BOS) is id 0 in the target and id 2 in the draft"),
        (Loaded(add_bos=False, bos=None), "the target starts every text with a BOS token and the draft does not"),
        (Loaded((*TOKENS, "d")), "only the draft has token 5, 'd': 6 tokens against 5"),
        (Loaded((*TOKENS, *(f"[PAD{i}]" for i in range(5, 4000)))), None),
        (Loaded((*TOKENS, "image"), frozenset({0, 1, 5})), None),
        (Loaded((*TOKENS, "<think>")), None),
    ],
)
def test_the_first_difference_of_two_loaded_tokenizers(draft: Loaded, reason: str | None) -> None:
    assert find_tokenizer_mismatch(Loaded(), draft) == reason


def test_padding_of_one_may_be_a_mark_of_the_other() -> None:
    assert find_tokenizer_mismatch(Loaded((*TOKENS, "[PAD5]", "[PAD6]")), Loaded((*TOKENS, "<think>"))) is None
    assert find_tokenizer_mismatch(Loaded((*TOKENS, "[PAD5]")), Loaded((*TOKENS, "d"))) == (
        "only the draft has token 5, 'd': 6 tokens against 6"
    )


def test_a_vocabulary_has_one_identity_on_all_runtimes() -> None:
    """The model of the PARD fixture in both formats, and the packaged pair, whose vocabulary it has."""

    def identify(backend: BackendName, path: Path) -> str:
        model = open_model(backend, path, LoadOptions(context_size=64, threads=1))
        with closing(model):
            identity = identify_tokenizer(model.tokenizer)
        if backend != "toy":
            with open_tokenizer(backend, path) as tokenizer:
                assert identify_tokenizer(tokenizer) == identity
        return identity

    pard = REPOSITORY / "tests" / "fixtures" / "pard"
    found = {identify("mlx", pard), identify("llamacpp", pard / "model.gguf"), identify("llamacpp", DRAFT)}
    assert len(found) == 1
    assert identify("toy", Path("tree")) not in found


def test_padding_is_no_part_of_a_vocabularys_identity() -> None:
    spelled = tuple(f"word {i}" for i in range(64))
    padded = Loaded((*spelled, *(f"[PAD{i}]" for i in range(64, 200))))
    assert identify_tokenizer(Loaded(spelled)) == identify_tokenizer(padded)
    assert identify_tokenizer(Loaded(spelled)) != identify_tokenizer(Loaded(("other", *spelled[1:])))
