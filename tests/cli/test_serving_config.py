"""The file of models that `edgespec serve --config` reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec.cli.serving_config import read_config
from edgespec.errors import InvalidRequest
from edgespec.server.models import LocalModel
from edgespec.server.remote_client import RemoteModel
from tests.gguf_models import TARGET
from tests.server.serving import serving


def test_each_model_has_its_own_options(tmp_path: Path) -> None:
    path = tmp_path / "models.toml"
    path.write_text(
        '[coder]\nmodel = "./coder.gguf"\ndraft = "ngram"\nctx = 4096\nparallel = 2\nflash-attention = false\n'
        '[small]\nkv_type = "q8_0"\ndraft-max = 0\nmmap = false\nexact = true\nthreads = 4\nbatch-threads = 2\n'
        'keep-alive = "1h30m"\n'
    )
    found = read_config(path)
    tables = [found[name] for name in ("coder", "small")]
    coder, small = (table.config for table in tables if isinstance(table, LocalModel))
    assert [table.keep_alive_s for table in tables if isinstance(table, LocalModel)] == [None, 5400]
    assert list(found) == ["coder", "small"]
    assert (coder.model, coder.draft, coder.draft_max) == ("./coder.gguf", "ngram", None)
    assert (coder.load.context_size, coder.load.caches, coder.load.flash_attention) == (4096, 2, False)
    assert (small.model, small.draft, small.draft_max) == (None, "auto", 0)
    assert (small.load.threads, small.load.batch_threads, coder.load.batch_threads) == (4, 2, None)
    assert (small.load.kv_type, small.load.mmap, small.load.exact, small.load.caches) == ("q8_0", False, True, 4)


@pytest.mark.parametrize(
    "text",
    [
        "draft-max = 3\ndraft-tree = 6\nacceptance = 'sample'",
        "draft_max = 3\ndraft_tree = 6\nacceptance = 'sample'",
    ],
)
def test_speculation_keys(text: str, tmp_path: Path) -> None:
    path = tmp_path / "models.toml"
    path.write_text(f"[a]\n{text}\n")
    config = read_config(path)["a"].config  # type: ignore[union-attr]
    assert (config.draft_max, config.draft_tree, config.acceptance) == (3, 6, "sample")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "names no model"),
        ("[a", "cannot read"),
        ("a = 3", "'a' is not a table"),
        ("[a]\nmodle = 'x'", "There is no option --modle"),
        ("[a]\nmodel = true", "Option '--model' requires an argument"),
        ("[a]\nctx = 'much'", "'much' is not a number"),
        ("[a]\nkeep-alive = 'soon'", "'soon' is neither seconds nor a duration"),
        ("[a]\nparallel = 0", "0 is not between 1 and"),
        ("[a]\nexact = 1", "Option '--exact' does not take a value"),
        ("[a]\nctx = 8192.7", "'8192.7' is not a number"),
        ("[a]\nctx = inf", "'inf' is not a number"),
        ("[a]\nthreads = true", "Option '--threads' requires an argument"),
        ("[a]\nkv-type = 'q2'", "'q2' is not one of"),
        ('[big]\nurl = "http://box/v1"', "There is no option --url"),
        ('[big]\nbackend = "vllm"', "'vllm' is not one of"),
    ],
)
def test_what_is_wrong_is_told_in_a_sentence(text: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "models.toml"
    with pytest.raises(InvalidRequest, match="cannot read"):
        read_config(path)
    path.write_text(text)
    with pytest.raises(InvalidRequest) as caught:
        read_config(path)
    assert told in caught.value.message and "\n" not in caught.value.message and caught.value.hint


def test_a_path_may_contain_an_equals_sign(tmp_path: Path) -> None:
    for name in ("epoch=3.gguf", "epoch=4.gguf"):
        (tmp_path / name).symlink_to(TARGET)
    arguments = ("./epoch=3.gguf", "epoch=4.gguf", "last=./epoch=4.gguf", str(tmp_path / "epoch=3.gguf"))
    with serving(tmp_path, *arguments[:3], "--ctx", "64") as server:
        assert [each["id"] for each in server.get("/v1/models").json()["data"]] == ["epoch=3", "epoch=4", "last"]
        for name in ("epoch=3", "last"):
            answer = server.post("/v1/completions", json={"model": name, "prompt": "def", "max_tokens": 1})
            assert answer.status_code == 200, answer.text
    with serving(tmp_path, arguments[3]) as server:
        assert [each["id"] for each in server.get("/v1/models").json()["data"]] == ["epoch=3"]


def read_remote(text: str, path: Path) -> RemoteModel:
    path.write_text(f'[big]\nbackend = "openai"\n{text}\n')
    found = read_config(path)["big"]
    assert isinstance(found, RemoteModel)
    return found


def test_a_model_of_another_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BIG_KEY", " sk-1 \n")
    path = tmp_path / "models.toml"
    found = read_remote('url = "https://box:8000/v1/"\nkey-env = "BIG_KEY"\nmodel = "a/b"\nparallel = 2', path)
    assert (found.url, found.model, found.key, found.parallel) == ("https://box:8000/v1", "a/b", "sk-1", 2)
    assert "sk-1" not in repr(found) and not found.sends_plain_key
    named = read_remote('url = "http://box:8000"\nkey_env = "BIG_KEY"', path)
    assert (named.url, named.model, named.sends_plain_key) == ("http://box:8000/v1", "big", True)
    for host in ("localhost", "127.0.0.2", "[::1]"):
        assert not read_remote(f'url = "http://{host}/v1"\nkey_env = "BIG_KEY"', path).sends_plain_key


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "url: Field required"),
        ("url = 3", "url: Input should be a valid string"),
        ('url = "box:8000"', "url: it is not an http or https address"),
        ('url = "ftp://box"', "url: it is not an http or https address"),
        ('url = "http://box:99999"', "url: it is not an http or https address"),
        ('url = "http://[::1"', "url: it is not an http or https address"),
        ('url = "http://xn--/v1"', "url: it is not an http or https address"),
        ('url = "http://bo\\u0000x/v1"', "url: it is not an http or https address"),
        ('url = "http://me:sk-secret@box/v1"', "url: it is not an http or https address"),
        ('url = "http://box/v1?key=sk-secret"', "url: it is not an http or https address"),
        ('url = "http://box/v1"\ndraft = "ngram"', "draft: Extra inputs are not permitted"),
        ('url = "http://box/v1"\napi_key = "sk-secret"', "api_key: Extra inputs are not permitted"),
        ('url = "http://box/v1"\nkey_env = "sk-secret"', "key_env: it names no environment variable that is set"),
        ('url = "http://box/v1"\nkey_env = "NO_SUCH_KEY"', "key_env: it names no environment variable that is set"),
        ('url = "http://box/v1"\nkey_env = "ODD_KEY"', "key_env: it names no environment variable that is set"),
        ('url = "http://box/v1"\nmodel = ""', "model: String should have at least 1 character"),
        ('url = "http://box/v1"\nparallel = 0', "parallel: Input should be greater than or equal to 1"),
        ('url = "http://box/v1"\nparallel = "many"', "parallel: Input should be a valid integer"),
    ],
)
def test_what_is_wrong_with_another_server(
    text: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ODD_KEY", "sk-secret\nx: y")
    with pytest.raises(InvalidRequest) as caught:
        read_remote(text, tmp_path / "models.toml")
    assert caught.value.message.startswith("[big]: ") and told in caught.value.message and caught.value.hint
    assert "sk-secret" not in f"{caught.value.message} {caught.value.hint}"


def test_the_server_has_those_of_the_file_and_those_named(tmp_path: Path) -> None:
    path = tmp_path / "models.toml"
    path.write_text('[a]\nmodel = "tree"\nbackend = "toy"\ndraft = "none"\nctx = 300\nparallel = 1\n')
    with serving(tmp_path, "b=linear", "--backend", "toy", "--config", str(path)) as server:
        assert [model.id for model in server.openai().models.list()] == ["a", "b"]
        assert server.ask("a", max_tokens=3).status_code == 200
        told = server.model("a")
        assert (told["context_size"], told["answers_at_once"], told["draft"]) == (300, 1, "none")
