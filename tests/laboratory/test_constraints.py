"""The program that answers under grammars with many vocabularies, on the packaged one."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from laboratory import constraints
from tests.gguf_models import TARGET, GgufBuilder


def test_answers_are_counted_and_vocabularies_without_an_end_are_named(tmp_path: Path) -> None:
    (tmp_path / "some.gguf").symlink_to(TARGET)
    endless = GgufBuilder(tmp_path / "endless.gguf", "llama", layers=1, width=8)
    del endless.writer.kv_data[0]["tokenizer.ggml.eos_token_id"]
    endless.save()
    result = CliRunner().invoke(constraints.main, [str(tmp_path), "--every", "12"])
    assert result.exit_code == 0, result.output
    last = json.loads(result.output.splitlines()[-1])
    assert last["ends"] == {"valid": 2 * 4 * last["constraints"]} and last["left_out"] == ["endless"]


def test_a_fault_is_told(tmp_path: Path) -> None:
    (tmp_path / "some.gguf").symlink_to(TARGET)
    with constraints.open_engine(tmp_path / "some.gguf", "llamacpp") as engine:
        (first, *_) = constraints.list_constraints()
        wrong = constraints.Constraint("wrong", first.structure, lambda text: False)
        ends, faults = constraints.check_answers(engine, [wrong])
    assert ends == {"invalid": 4} and faults[0].startswith("wrong, way 0: invalid: ")
