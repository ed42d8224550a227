"""Vocabularies of real models: their tokens, their text at every cut, and answers that go on behind a cut."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import tokenizers
from mlx_lm.utils import load_tokenizer as load_hf_tokenizer
from tokenizers import decoders, models, normalizers

from edgespec.backends.llamacpp.model import load
from edgespec.backends.mlx.model import load as load_mlx
from edgespec.backends.mlx.tokenizer import HfTokenizer
from edgespec.backends.options import LoadOptions
from edgespec.engine.events import AnswerStart
from edgespec.engine.prompts import PromptEncoder
from edgespec.text.chat_template import Message
from edgespec.text.stream import TextStream
from edgespec.text.tokenizer import Tokenizer, join_start
from tests.gguf_models import REPOSITORY, TARGET
from tests.mlx_models import DENSE, make_folder

FOLDER = Path(os.environ.get("EDGESPEC_TEST_ZOO", REPOSITORY.parent / "shared" / "zoo")) / "vocabularies"
SENTENCEPIECE = Path("sentencepiece")  # made in the test
FILES = sorted(FOLDER.glob("*.gguf"))
SEPARATOR = "\n__ggml_vocab_test__\n"
TEXTS = [
    "Hello, wörld! Grüße aus 東京 und שלום.",
    " It's  two   spaces\n\n\tand a tab;\r\n    return {'a': [1, 22, 333.5]}\n",
    "🙂👨‍👩‍👧‍👦🏳️‍🌈 e\u0301 क्षि ﷽ \u200b\u2028 \U0001f1e9\U0001f1ea",
    "▁ is a letter, <0x0A> is no line break, and \x01\x7f stay.",
]


@pytest.fixture(scope="module", params=[TARGET, SENTENCEPIECE, *FILES], ids=lambda path: path.stem)
def path(request: pytest.FixtureRequest) -> Path:
    return Path(request.param)


@pytest.fixture(scope="module")
def vocabulary(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tokenizer]:
    if path == SENTENCEPIECE:
        folder = tmp_path_factory.mktemp("sentencepiece")
        size = write_sentencepiece(folder)
        (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
        yield HfTokenizer(load_hf_tokenizer(folder), size)
        return
    model = load(path, LoadOptions(), vocabulary_only=True)
    yield model.tokenizer
    model.close()


@pytest.fixture
def writer(path: Path, vocabulary: Tokenizer) -> Tokenizer:
    """The vocabulary of a model that writes text."""
    if "bert" in path.name:
        pytest.skip("BERT's vocabularies are for embeddings: they keep neither case nor spaces")
    return vocabulary


def write_sentencepiece(folder: Path, template: str = "") -> int:
    """Write a tokenizer like that of Llama 2: words and bytes, with a space in front of a text. Returns its size."""
    words = ["▁", "H", "e", "l", "o", "r", "t", "▁H", "▁He", "▁Hel", "▁Hell", "▁Hello", "▁t", "▁▁"]
    vocab = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    merges = [("▁", "H"), ("▁H", "e"), ("▁He", "l"), ("▁Hel", "l"), ("▁Hell", "o"), ("▁", "t"), ("▁", "▁")]
    ids = {token: i for i, token in enumerate(vocab)}
    made = tokenizers.Tokenizer(models.BPE(ids, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    made.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**names, "chat_template": template}))
    return int(made.get_vocab_size())


def test_real_vocabularies_are_here() -> None:
    if not FILES:
        pytest.skip(f"{FOLDER} has no vocabularies: two small ones are tested")


def test_tokens_are_those_of_the_model_s_authors(path: Path, vocabulary: Tokenizer) -> None:
    given, expected = Path(f"{path}.inp"), Path(f"{path}.out")
    if not given.exists():
        pytest.skip("there are no tokens to compare with")
    texts, lines = given.read_text(encoding="utf-8").split(SEPARATOR), expected.read_text().splitlines()
    assert len(lines) > 40
    for text, line in zip(texts, lines, strict=False):  # the end of the file may be another separator
        assert vocabulary.encode(text, parse_special=False) == list(map(int, line.split())), text


def show(tokenizer: Tokenizer, tokens: list[int], stops: tuple[str, ...] = ()) -> str:
    stream = TextStream(tokenizer, stops)
    pieces = [piece for token in tokens for piece in stream.push(token, "")]
    return "".join(piece.text for piece in [*pieces, *stream.finish()])


def spell(tokenizer: Tokenizer, tokens: list[int]) -> bytes:
    return b"".join(map(tokenizer.piece, tokens))


@pytest.mark.parametrize("text", TEXTS)
def test_an_answer_that_is_cut_is_the_beginning_of_the_whole(writer: Tokenizer, text: str) -> None:
    tokens = writer.encode(text, parse_special=False)
    whole = show(writer, tokens)
    assert "\ufffd" not in whole and whole.encode() == spell(writer, tokens)
    shown = [show(writer, tokens[:n]) for n in range(len(tokens) + 1)]
    for n, each in enumerate(shown):
        assert each == spell(writer, tokens[:n]).decode("utf-8", "ignore"), n
    assert all(longer.startswith(shorter) for shorter, longer in pairwise(shown))


@pytest.mark.parametrize("text", TEXTS)
def test_stop_strings_that_several_tokens_spell(writer: Tokenizer, text: str) -> None:
    tokens = writer.encode(text, parse_special=False)
    whole = show(writer, tokens)
    for start in range(1, len(whole) - 3, 2):
        for stop in (whole[start : start + 3], whole[start : start + 9]):
            assert show(writer, tokens, (stop,)) == whole[: whole.find(stop)], stop


def control_token(tokenizer: Tokenizer) -> str:
    """The spelling of a token that ends a prompt and has no text."""
    for token in (tokenizer.bos, tokenizer.eos, *sorted(tokenizer.end_of_generation)):
        if token is not None and tokenizer.encode(tokenizer.special_text(token), parse_special=True) == [token]:
            return tokenizer.special_text(token)
    raise AssertionError("there is no control token")


@pytest.mark.parametrize("prompt", ["{control}", "{control}\n", "Say it. [/INST]", "{control}user: Say it.\nA:"])
@pytest.mark.parametrize("text", TEXTS)
def test_an_answer_that_goes_on_neither_gains_nor_loses_a_space(writer: Tokenizer, prompt: str, text: str) -> None:
    prompt = prompt.format(control=control_token(writer))
    read = writer.encode(prompt, parse_special=True)
    answer = writer.encode(prompt + text, parse_special=True)[len(read) :]
    for n in range(len(answer) + 1):
        shown = show(writer, answer[:n])
        if shown.isspace():
            continue
        again = writer.encode(join_start(writer, prompt, shown), parse_special=True)
        assert spell(writer, again) == spell(writer, read) + shown.encode(), shown


def test_the_prompt_of_an_answer_that_goes_on(tmp_path: Path) -> None:
    write_sentencepiece(make_folder(tmp_path, DENSE), "{{ messages[0].content }}</s>")
    model = load_mlx(tmp_path, LoadOptions(context_size=64))
    encoder, asked = PromptEncoder(model), (Message("user", "Hello"),)
    begun = encoder.encode(asked, {}, AnswerStart(" Hello")).tokens
    assert [model.tokenizer.special_text(token) for token in begun] == ["▁Hello", "</s>", "▁Hello"]
    model.close()
