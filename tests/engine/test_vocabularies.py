"""Grammars on vocabularies of every kind: forced text is the middle of an answer, and nothing is ever unmasked."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from edgespec.backends import Model, open_model
from edgespec.backends.options import LoadOptions
from edgespec.backends.toy import load as load_toy
from edgespec.core.protocols import NO_DRAFT, Draft, Verdict
from edgespec.core.sampling import Sampler, SamplingParams
from edgespec.core.scores import Scores
from edgespec.engine.block_entry import BlockEntry, Boundary
from edgespec.engine.engine import Engine
from edgespec.engine.events import Request
from edgespec.engine.grammar_check_main import TokenBytes
from edgespec.engine.grammar_compiler import GrammarCompiler, Spelling
from edgespec.engine.grammar_mask import GrammarMask, MaskedVerifier
from edgespec.engine.structure import Structure, json_structure
from edgespec.errors import BackendError
from edgespec.text.tokenizer import Tokenizer, encode_inside
from laboratory.constraints import RUNTIMES, check_answers, list_constraints, open_engine
from laboratory.vocabulary_models import write_gguf, write_mlx
from tests.engine.conftest import PLAIN, generate
from tests.gguf_models import REPOSITORY, TARGET

FOLDER = Path(os.environ.get("EDGESPEC_TEST_ZOO", REPOSITORY.parent / "shared" / "zoo")) / "vocabularies"
WORDS = ("▁hello", "▁world", "hello", "world", "▁▁", ">{", ">\n", "</think", "red", "\n\n")


@pytest.fixture(scope="module")
def spm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SentencePiece vocabulary of bytes and few words that puts a space before a text, as Llama 2's does."""
    path = tmp_path_factory.mktemp("spm") / "vocabulary.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    begun = (word[:n] for word in WORDS for n in range(1, len(word) + 1))  # words are merged letter by letter
    texts = dict.fromkeys([*begun, *map(chr, range(33, 127))])
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *texts]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * 259 + [-float(i) for i in range(len(tokens) - 259)])
    writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module", params=RUNTIMES)
def model(request: pytest.FixtureRequest, spm: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    path = tmp_path_factory.mktemp("model") / ("model.gguf" if request.param == "llamacpp" else "model")
    (write_gguf if request.param == "llamacpp" else write_mlx)(spm, path)
    options = LoadOptions(threads=1, context_size=256)
    with closing(open_model(request.param, path, options)) as opened:
        yield opened


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("name", ["packaged", "spm"])
def test_every_answer_follows_its_constraint(name: str, runtime: Any, spm: Path) -> None:
    """Schemas, choices, expressions, calls, blocks and reasoning, plainly and with drafts; a part of all constraints.

    `laboratory.constraints` has them all, on the vocabularies of real models.
    """
    with open_engine(TARGET if name == "packaged" else spm, runtime) as engine:
        ends, faults = check_answers(engine, list_constraints()[::3])
    assert not faults and ends.keys() == {"valid"}


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("name", ["llama-spm", "deepseek-coder"])
def test_every_answer_with_a_real_vocabulary_follows_its_constraint(name: str, runtime: Any) -> None:
    path = FOLDER / f"ggml-vocab-{name}.gguf"
    if not path.is_file():
        pytest.skip(f"{path.name}, a vocabulary of llama.cpp's, is not in the folder of EDGESPEC_TEST_ZOO")
    with open_engine(path, runtime) as engine:
        ends, faults = check_answers(engine, list_constraints()[::8])
    assert not faults and ends.keys() == {"valid"}


@pytest.mark.parametrize(
    "text", ["hello world", " hello", "  hello", "world\n\nhello", "\n", "é漢", ">{", "", "a", "."]
)
def test_text_inside_of_an_answer_has_the_tokens_of_its_bytes(text: str, model: Model) -> None:
    tokens = encode_inside(model.tokenizer, text)
    assert tokens is not None
    assert b"".join(map(model.tokenizer.piece, tokens)) == text.encode()


def test_a_text_has_no_space_in_front(model: Model) -> None:
    """Its tokens are those that the vocabulary has for it behind another text."""
    tokenizer = model.tokenizer
    whole, inside = tokenizer.encode("hello world", parse_special=False), encode_inside(tokenizer, "hello world")
    assert b"".join(map(tokenizer.piece, whole)) == b" hello world" and inside is not None
    assert [tokenizer.piece(token) for token in inside] == [b"hello", b" world"]


class Lower:
    """A vocabulary that spells every text in small letters, without the byte x."""

    def __init__(self) -> None:
        self._bytes = load_toy("tree", LoadOptions()).tokenizer
        self.vocab_size, self.end_of_generation = self._bytes.vocab_size, self._bytes.end_of_generation

    def encode(self, text: str, *, parse_special: bool) -> list[int]:
        return self._bytes.encode(text.lower(), parse_special=parse_special)

    def piece(self, token: int) -> bytes:
        return self._bytes.piece(token)


def test_what_the_tokenizer_spells_otherwise_is_split_by_bytes() -> None:
    tokenizer: Any = Lower()
    assert encode_inside(tokenizer, "Ab") is None
    pieces = (*(b"" if i == ord("x") else bytes([i]) for i in range(256)), b"<end>", b"Ab", b"Abc")
    split = Spelling(tokenizer, TokenBytes(pieces, (256, ord("x")), None, (256,)))
    assert [pieces[token] for token in split(b"AbcAbAd")] == [b"Abc", b"Ab", b"A", b"d"]
    assert [pieces[token] for token in split(b"Axb")] == [b"A"], "up to a byte that no token begins with"


def mask_of(tokenizer: Tokenizer, structure: Structure, start: int = 0) -> GrammarMask:
    with closing(GrammarCompiler(tokenizer)) as compiler:
        matcher = compiler.compile(structure).result()
    return GrammarMask(matcher, Sampler(SamplingParams(), tokenizer.vocab_size), start)


class Stubborn:
    """A Verifier that emits given tokens, whatever they are."""

    def __init__(self, *tokens: int) -> None:
        self._tokens = tokens

    def verify(self, draft: Draft, scores: Scores, prefix: Sequence[int]) -> Verdict:
        return Verdict(tuple(range(len(self._tokens) - 1)), self._tokens[-1])


def test_an_emitted_token_that_the_grammar_forbids_ends_the_answer() -> None:
    """As the next token, on the path of a draft, and as an end; what stands behind an end is not emitted."""
    tokenizer = load_toy("tree", LoadOptions()).tokenizer
    (end,) = tokenizer.end_of_generation
    a, b, scores = ord("a"), ord("b"), Any
    mask = mask_of(tokenizer, Structure((("ab",),)), 1)

    def emit(prefix: list[int], *tokens: int) -> None:
        draft = Draft.chain(tokens[:-1]) if len(tokens) > 1 else NO_DRAFT
        MaskedVerifier(mask, Stubborn(*tokens), tokenizer.end_of_generation).verify(draft, scores, prefix)

    emit([7], a, b)
    emit([7], a)
    emit([7], a, b, end, 3)
    emit([7, a, b], end)
    for prefix, tokens in (
        ([7], (b,)),
        ([7], (a, a)),
        ([7], (a, end)),
        ([7, a], (end,)),
        ([7, b], (b,)),
        ([7, a, b], (b,)),
    ):
        with pytest.raises(BackendError, match="its structure forbids"):
            emit(prefix, *tokens)
        with pytest.raises(BackendError, match="its structure forbids"):
            mask.forced([*prefix, *(each for each in tokens if each != end), 3])
    assert mask.forced([7]) == [a, b]


def test_drafted_tokens_may_be_forbidden() -> None:
    """Rules ask for the distribution behind them; it does not matter, since they are not accepted."""
    tokenizer = load_toy("tree", LoadOptions()).tokenizer
    mask = mask_of(tokenizer, Structure((("ab",),)))
    logits = np.zeros(tokenizer.vocab_size, np.float32)
    assert mask.distribution(logits, [ord("b")]).dense(tokenizer.vocab_size).sum() > 0
    assert mask.distribution(logits, []).dense(tokenizer.vocab_size)[ord("b")] == 0


def test_a_token_that_crosses_into_a_block_is_taken_with_its_rest_or_not_at_all(model: Model) -> None:
    """The vocabulary has ">{" and ">" with a line break, which hold the end of a marker."""
    tokenizer = model.tokenizer
    ids = {tokenizer.piece(token): token for token in range(259, tokenizer.vocab_size)}
    brace, line, plain = ids[b">{"], ids[b">\n"], ids[b">"]
    boundary = Boundary(tokenizer, ("</think>",))
    assert boundary.rests(b"so</think") == {brace: b"{", line: b"\n"} and not boundary.rests(b"so</thin")
    with closing(GrammarCompiler(tokenizer)) as compiler:
        for structure, takes_brace in ((json_structure({"type": "object"}), True), (Structure((("red",),)), False)):
            matcher = compiler.compile(structure).result()
            entry = BlockEntry(boundary, matcher)
            assert entry.list_refused(b"</think") == ([line] if takes_brace else [brace, line])
            free = entry.limit(Sampler(SamplingParams(), tokenizer.vocab_size))
            before = encode_inside(tokenizer, "x</think") or []
            chances = free.distribution(np.zeros(tokenizer.vocab_size, np.float32), before).dense(tokenizer.vocab_size)
            assert chances[line] == 0 < chances[plain] and (chances[brace] > 0) == takes_brace
            with pytest.raises(BackendError, match="its structure forbids"):
                entry.begin(b"</think", line)
            assert entry.begin(b"</think", plain).compute_ff_bytes() == matcher.deep_copy().compute_ff_bytes()
            if takes_brace:
                assert not entry.begin(b"</think", brace).try_consume_tokens([plain, brace]), "it is behind the brace"
                assert entry.begin(b"</think", brace).try_consume_tokens(
                    tokenizer.encode("}", parse_special=False)[-1:]
                )


@pytest.mark.parametrize("way", ["choice", "schema"])
def test_forced_text_is_drafted_as_the_model_would_write_it(way: str, model: Model) -> None:
    """Whole words, not the space and letters that a wrong beginning leaves."""
    structure = Structure((("hello world",),)) if way == "choice" else json_structure({"const": "hello world"})
    text, finished = generate(Engine(model, [], PLAIN), Request("hello", max_tokens=40, structure=structure))
    assert text == ("hello world" if way == "choice" else '"hello world"')
    pieces = [model.tokenizer.piece(token) for token in finished.tokens]
    assert pieces[-3 if way == "choice" else -4 :][:2] == [b"hello", b" world"]
