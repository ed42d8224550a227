"""The sweep of architectures on two models of the tests, in place of llama.cpp's."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest
from click.testing import CliRunner

from laboratory import architectures
from laboratory.architecture_arms import ARMS, is_valid
from laboratory.architectures import main, read_last_words, sweep_model
from laboratory.character_vocabulary import write_with_characters
from tests.gguf_models import hybrid, llama


def test_every_arm_gives_the_text_of_plain_decoding(tmp_path: Path) -> None:
    llama(tmp_path / "llama.gguf")
    hybrid(tmp_path / "hybrid.gguf")
    done = CliRunner().invoke(main, [str(tmp_path)])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["faults"] == 0 and set(found["models"]) == {"llama", "hybrid"}
    ends = {name: {arm: end["end"] for arm, end in arms.items()} for name, arms in found["models"].items()}
    assert set(ends["llama"].values()) <= {"same", "near tie"} and set(ends["llama"]) == set(ARMS)
    assert found["models"]["llama"]["memory"]["tau"] > 2, "an answer that was given before is drafted"
    refused = {arm for arm, end in ends["hybrid"].items() if end == "refused"}
    assert refused == {"layerskip:1", "sparse:4,16"}
    assert "llama: " in done.stderr and "refused" in done.stderr


def test_a_damaged_model_is_refused_and_a_slow_one_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(60))
    assert {end.end for end in sweep_model(broken, ["plain", "ngram"]).values()} == {"refused"}
    monkeypatch.setattr(architectures, "_LIMIT_S", 0.0)
    assert sweep_model(broken, ["plain"])["plain"].end == "hang"


def test_the_vocabulary_of_characters_has_the_size_of_the_models_own(tmp_path: Path) -> None:
    llama(tmp_path / "own.gguf")
    write_with_characters(tmp_path / "own.gguf", tmp_path / "characters.gguf")
    own, characters = (gguf.GGUFReader(tmp_path / f"{name}.gguf") for name in ("own", "characters"))
    assert len(own.fields["tokenizer.ggml.tokens"].data) == len(characters.fields["tokenizer.ggml.tokens"].data)
    assert [bytes(tensor.data) for tensor in own.tensors] == [bytes(tensor.data) for tensor in characters.tensors]


def test_last_words(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert read_last_words(log) == ""
    log.write_text("a.cpp:1: GGML_ASSERT(buffer) failed\nbacktrace\n")
    assert read_last_words(log) == "a.cpp:1: GGML_ASSERT(buffer) failed"


def test_answers_are_checked() -> None:
    assert is_valid('{"name": "x", "size": 3, "tags": ["a"]}')
    assert not any(map(is_valid, ('{"name": "x", "size": 3', '{"name": "x", "size": 300, "tags": []}')))
