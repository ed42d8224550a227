"""The file of models that `edgespec serve --config` reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec.cli.serving_config import read_config
from edgespec.errors import InvalidRequest
from tests.server.serving import serving


def test_each_model_has_its_own_options(tmp_path: Path) -> None:
    path = tmp_path / "models.toml"
    path.write_text(
        '[coder]\nmodel = "./coder.gguf"\ndraft = "ngram"\nctx = 4096\nparallel = 2\nflash-attention = false\n'
        '[small]\nkv_type = "q8_0"\ndraft-max = 0\nmmap = false\nexact = true\nthreads = 4\nbatch-threads = 2\n'
        'keep-alive = "1h30m"\n'
    )
    found = read_config(path)
    coder, small = found["coder"].config, found["small"].config
    assert (found["coder"].keep_alive_s, found["small"].keep_alive_s) == (None, 5400)
    assert list(found) == ["coder", "small"]
    assert (coder.model, coder.draft, coder.draft_max) == ("./coder.gguf", "ngram", None)
    assert (coder.load.context_size, coder.load.caches, coder.load.flash_attention) == (4096, 2, False)
    assert (small.model, small.draft, small.draft_max) == (None, "auto", 0)
    assert (small.load.threads, small.load.batch_threads, coder.load.batch_threads) == (4, 2, None)
    assert (small.load.kv_type, small.load.mmap, small.load.exact, small.load.caches) == ("q8_0", False, True, 4)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("draft-max = 3\ndraft-tree = 6\nacceptance = 'sample'", (3, 6, "sample")),
        ("draft_max = 3\ndraft_tree = 6\nacceptance = 'sample'", (3, 6, "sample")),
        ("gamma = 3\nnodes = 6\nverify = 'sample'", (3, 6, "sample")),
    ],
)
def test_speculation_keys_and_their_synonyms(text: str, expected: tuple[int, int, str], tmp_path: Path) -> None:
    path = tmp_path / "models.toml"
    path.write_text(f"[a]\n{text}\n")
    config = read_config(path)["a"].config
    assert (config.draft_max, config.draft_tree, config.acceptance) == expected


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "names no model"),
        ("[a", "cannot read"),
        ("a = 3", "'a' is not a table"),
        ("[a]\nmodle = 'x'", "there is no key 'modle'"),
        ("[a]\nmodel = 3", "model must be a string"),
        ("[a]\nctx = 'much'", "'much' is not a valid integer"),
        ("[a]\nkeep-alive = 'soon'", "'soon' is neither seconds nor a duration"),
        ("[a]\nparallel = 0", "0 is not in the range"),
        ("[a]\nexact = 1", "exact must be true or false"),
        ("[a]\nkv-type = 'q2'", "'q2' is not one of"),
        ("[a]\ndraft = ['x']", "draft must be a string"),
    ],
)
def test_what_is_wrong_is_told_in_a_sentence(text: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "models.toml"
    path.write_text(text)
    with pytest.raises(InvalidRequest) as caught:
        read_config(path)
    assert told in caught.value.message and "\n" not in caught.value.message and caught.value.hint


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot read"):
        read_config(tmp_path / "none.toml")


def test_the_server_has_those_of_the_file_and_those_named(tmp_path: Path) -> None:
    path = tmp_path / "models.toml"
    path.write_text('[a]\nmodel = "tree"\nbackend = "toy"\ndraft = "none"\nctx = 300\nparallel = 1\n')
    with serving(tmp_path, "b=linear", "--backend", "toy", "--config", str(path)) as server:
        assert [model.id for model in server.openai().models.list()] == ["a", "b"]
        assert server.ask("a", max_tokens=3).status_code == 200
        told = server.model("a")
        assert (told["context_size"], told["answers_at_once"], told["draft"]) == (300, 1, "none")
