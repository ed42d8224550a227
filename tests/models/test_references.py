"""Every form of reference, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.errors import UnknownModel
from edgespec.models.references import (
    Alias,
    HubFile,
    HubQuant,
    HubRepo,
    LocalPath,
    PackagedFile,
    Reference,
    parse_reference,
)
from edgespec.models.short_names import shorten_names


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("llama-70b-q4", Alias("llama-70b-q4")),
        ("qwen2.5-72b-q4", Alias("qwen2.5-72b-q4")),
        ("user/repo", HubRepo("user/repo")),
        ("user/repo@v1.0", HubRepo("user/repo", "v1.0")),
        ("hf:user/repo", HubRepo("user/repo")),
        ("user/repo:Q4_K_M", HubQuant("user/repo", "Q4_K_M")),
        ("user/repo@abc:Q4_K_M", HubQuant("user/repo", "Q4_K_M", "abc")),
        ("hf:user/repo:Q8_0", HubQuant("user/repo", "Q8_0")),
        ("hf:user/repo/file.gguf", HubFile("user/repo", "file.gguf")),
        ("hf:user/repo@v1/sub/file.GGUF", HubFile("user/repo", "sub/file.GGUF", "v1")),
        ("hf.co/user/repo", HubRepo("user/repo")),
        ("hf.co/user/repo:Q8_0", HubQuant("user/repo", "Q8_0")),
        ("https://hf.co/user/repo@v1:Q8_0", HubQuant("user/repo", "Q8_0", "v1")),
        ("huggingface.co/user/repo/sub/file.gguf", HubFile("user/repo", "sub/file.gguf")),
        ("https://huggingface.co/user/repo/", HubRepo("user/repo")),
        ("https://huggingface.co/user/repo/tree/main", HubRepo("user/repo")),
        ("https://huggingface.co/user/repo/tree/v2", HubRepo("user/repo", "v2")),
        ("http://www.HuggingFace.co/user/repo/blob/main/a/b.gguf", HubFile("user/repo", "a/b.gguf")),
        ("https://huggingface.co/user/repo/resolve/v1/b.gguf?download=true", HubFile("user/repo", "b.gguf", "v1")),
        ("package:python-6m/target.gguf", PackagedFile("python-6m/target.gguf")),
        ("model.gguf", LocalPath(Path("model.gguf"))),
        ("some/where/model.gguf", LocalPath(Path("some/where/model.gguf"))),
        ("./folder", LocalPath(Path("folder"))),
        ("../folder", LocalPath(Path("../folder"))),
        ("/abs/olute", LocalPath(Path("/abs/olute"))),
        ("~/m", LocalPath(Path("~/m").expanduser())),
    ],
)
def test_each_form_is_read(text: str, expected: Reference) -> None:
    assert parse_reference(text) == expected


@pytest.mark.parametrize(
    "text", ["user/repo@v1:Q8_0", "hf:user/repo@v1/a/b.gguf", "user/repo", "package:a/b.gguf", "alias"]
)
def test_a_reference_prints_as_it_is_typed(text: str) -> None:
    assert str(parse_reference(text)) == text


def test_an_existing_path_wins_over_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "user" / "repo").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert parse_reference("user/repo") == LocalPath(Path("user/repo"))
    assert parse_reference("user") == Alias("user")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        ("   ", "empty"),
        (" llama", "spaces"),
        ("a\nb", "unprintable"),
        ("a b", "it is not an alias, a repository or an existing path"),
        ("--help", "it is not an alias, a repository or an existing path"),
        ("user/repo:", "colon"),
        ("user/repo:Q4 K", "colon"),
        ("user/repo/file", "prefix hf:"),
        ("hf:user", "it is not an alias, a repository or an existing path"),
        ("hf:user/repo/../../etc/x.gguf", "leaves its folder"),
        ("hf:user/repo//x.gguf", "leaves its folder"),
        ("hf:user/repo/./x.gguf", "leaves its folder"),
        ("hf:user/repo/a\\..\\x.gguf", "leaves its folder"),
        ("hf:user/repo/readme.md", "does not end in .gguf"),
        ("hf:../repo/x.gguf", "it is not an alias, a repository or an existing path"),
        ("package:../../secret", "leaves its folder"),
        ("https://example.org/x.gguf", "web addresses"),
        ("https://huggingface.co.example.org/user/repo", "web addresses"),
        ("https://huggingface.co/user", "it is not an alias, a repository or an existing path"),
        ("hf.co/user/repo/../../etc/x.gguf", "leaves its folder"),
        ("https://huggingface.co/user/repo/blob/main/README.md", "does not end in .gguf"),
        ("https://huggingface.co/user/repo/blob/..%2F/x.gguf", "it is not an alias"),
        ("user/re--po", "it is not an alias, a repository or an existing path"),
        ("ünï/côde", "it is not an alias, a repository or an existing path"),
    ],
)
def test_invalid_references_are_refused_with_a_reason(text: str, message: str) -> None:
    with pytest.raises(UnknownModel) as caught:
        parse_reference(text)
    assert message in caught.value.message
    assert caught.value.hint


@given(st.text(max_size=60) | st.from_regex(r"(hf:|package:)?[a-z./@:~\\-]{0,30}(\.gguf)?", fullmatch=True))
def test_any_text_gives_a_reference_or_one_error(text: str) -> None:
    try:
        found = parse_reference(text)
    except UnknownModel as error:
        assert error.message.isascii() or error.message
        return
    if isinstance(found, HubFile | PackagedFile):
        assert ".." not in found.path.split("/")
        assert not found.path.startswith("/")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/home/me/models/x-Q4_0.gguf", "x-Q4_0.gguf"),
        ("ngram+package:python-6m/draft.gguf", "ngram+python-6m/draft"),
        ("~/a.gguf+./b+../c", "a.gguf+b+c"),
        ("hf:me/x/y.gguf", "hf:me/x/y.gguf"),
        ("python-6m", "python-6m"),
        ("/", "/"),
    ],
)
def test_names_for_people_have_no_folders(text: str, shown: str) -> None:
    assert shorten_names(text) == shown
