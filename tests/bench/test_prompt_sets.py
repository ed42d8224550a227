"""The shipped prompt sets by number and size, both line forms of a file of one's own, and every kind of bad line."""

from __future__ import annotations

import codeop
import json
import re
from pathlib import Path

import pytest

from edgespec.bench import prompt_sets
from edgespec.bench.prompt_sets import CATEGORIES, BenchPrompt, read_prompts, read_shipped_prompts
from edgespec.errors import InvalidRequest


def written(tmp_path: Path, data: str | bytes) -> Path:
    path = tmp_path / "own.jsonl"
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def refusal(path: Path) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        read_prompts(path)
    return caught.value


def test_ids_are_unique_and_name_their_category() -> None:
    prompts = read_shipped_prompts()
    assert len({prompt.id for prompt in prompts}) == len(prompts)
    assert all(re.fullmatch(rf"{prompt.category}-\d+", prompt.id) for prompt in prompts)
    assert len({prompt.turns for prompt in prompts}) == len(prompts)


def test_order_is_that_of_the_categories() -> None:
    assert read_shipped_prompts() == [prompt for name in CATEGORIES for prompt in read_shipped_prompts([name])]
    assert read_shipped_prompts(["json", "chat"]) == read_shipped_prompts(["chat"]) + read_shipped_prompts(["json"])
    assert read_shipped_prompts([]) == []


def test_code_to_be_continued_is_the_beginning_of_valid_python() -> None:
    for prompt in read_shipped_prompts(["code_completion"]):
        assert 10 <= len(prompt.turns[0].splitlines()) <= 40
        codeop.compile_command(prompt.turns[0], symbol="exec")  # raises SyntaxError for what nothing can complete


def test_code_to_be_edited_is_valid_python_followed_by_a_request() -> None:
    for prompt in read_shipped_prompts(["code_edit"]):
        given, request, begun = re.split(r"\n\n\n(# The same .*:)\n", prompt.turns[0])
        compile(given, prompt.id, "exec")
        assert 25 <= len(given.splitlines()) <= 60, prompt.id
        assert request and begun


def test_unknown_category_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidRequest, match="no prompt category 'poetry'") as caught:
        read_shipped_prompts(["chat", "poetry"])
    assert all(name in caught.value.hint for name in CATEGORIES)


def test_both_forms_are_read(tmp_path: Path) -> None:
    lines = [
        {"question_id": 81, "category": "writing", "turns": ["Hello", "Go on\u2028"], "reference": []},
        {"question_id": "x-1", "category": "maths", "turns": ["1 + 1 ="]},
        {"prompt": "def f(x):"},
        {"prompt": "a", "id": "mine", "category": "code"},
        {"prompt": "b", "id": 7},
    ]
    text = "\n".join(json.dumps(line, ensure_ascii=False) for line in lines)
    assert read_prompts(written(tmp_path, text)) == [
        BenchPrompt("81", "writing", ("Hello", "Go on\u2028")),
        BenchPrompt("x-1", "maths", ("1 + 1 =",)),
        BenchPrompt("3", "own", ("def f(x):",)),
        BenchPrompt("mine", "code", ("a",)),
        BenchPrompt("7", "own", ("b",)),
    ]


def test_byte_order_mark_carriage_returns_and_blank_lines_do_no_harm(tmp_path: Path) -> None:
    path = written(tmp_path, b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n{"prompt": "b"}\r\n')
    assert [(prompt.id, prompt.turns) for prompt in read_prompts(path)] == [("1", ("a",)), ("3", ("b",))]


def test_what_is_shipped_reads_like_a_file_of_ones_own() -> None:
    folder = Path(prompt_sets.__file__).parent / "prompt_sets_data"
    assert {path.stem for path in folder.iterdir()} == set(CATEGORIES)
    for name in CATEGORIES:
        assert read_prompts(folder / f"{name}.jsonl") == read_shipped_prompts([name])


@pytest.mark.parametrize(
    "line",
    [
        "def f(x):",
        "[" * 100_000,
        '["a"]',
        "null",
        '{"text": "a"}',
        '{"prompt": "a", "turns": ["a"]}',
        '{"prompt": 3}',
        '{"prompt": ""}',
        '{"turns": []}',
        '{"turns": "a"}',
        '{"turns": ["a", null]}',
        '{"turns": ["a", " "]}',
        '{"prompt": "\\ud800"}',
        '{"prompt": "a", "id": null}',
        '{"question_id": true, "turns": ["a"]}',
        '{"prompt": "a", "category": 1}',
    ],
)
def test_bad_line_is_named(tmp_path: Path, line: str) -> None:
    path = written(tmp_path, f'{{"prompt": "good"}}\n\n{line}\n')
    error = refusal(path)
    assert error.message == f"'{path}', line 3 is not a prompt."
    assert '{"prompt": "..."}' in error.hint


def test_duplicate_ids_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path, '{"prompt": "a", "id": 2}\n{"prompt": "b"}\n')
    assert refusal(path).message == f"'{path}', line 2 has the same id '2' as line 1."


def test_line_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    path = written(tmp_path, b'{"prompt": "a"}\n{"prompt": "caf\xe9"}\n')
    assert refusal(path).message == f"'{path}', line 2 is not UTF-8 text."


@pytest.mark.parametrize("data", ["", "\n \n", "\ufeff"])
def test_file_without_prompts_is_refused(tmp_path: Path, data: str) -> None:
    path = written(tmp_path, data)
    assert refusal(path).message == f"'{path}' contains no prompts."


def test_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path / "absent").message == f"cannot read {tmp_path / 'absent'}: No such file or directory."
    assert refusal(tmp_path).message == f"cannot read {tmp_path}: Is a directory."


def test_file_above_the_bound_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, '{"prompt": "a"}'.ljust(1 << 20))
    monkeypatch.setattr(prompt_sets, "MAX_BYTES", 1 << 20)
    assert len(read_prompts(path)) == 1
    path.write_bytes(path.read_bytes() + b"\n")
    assert refusal(path).message == f"'{path}' is larger than 1 MiB."
