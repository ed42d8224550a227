"""The memory that training needs, known before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optimizers
import pytest

from edgespec.adapt.run import estimate_training_bytes
from edgespec.adapt.student import Student
from tests.adapt.drafts import make_draft


@pytest.mark.parametrize("rank", [None, 8])
@pytest.mark.parametrize("name", ["f16", "4-bit-folder"])
def test_memory_is_known_before(name: str, rank: int | None, tmp_path: Path) -> None:
    path, _ = make_draft(name, tmp_path)
    estimate = estimate_training_bytes(path, 512, rank=rank)
    student = Student.open(path)
    student.train_all() if rank is None else student.train_lora(rank)
    tokens = mx.random.randint(4, 4096, (1, 512))
    gradient = nn.value_and_grad(
        student.network, lambda: nn.losses.cross_entropy(student.network(tokens), tokens, reduction="mean")
    )
    optimizer = optimizers.AdamW(learning_rate=1e-4)
    mx.clear_cache()
    mx.reset_peak_memory()
    for _ in range(2):
        optimizer.update(student.network, gradient()[1])
        mx.eval(student.network.parameters(), optimizer.state)
    assert 0.7 * estimate <= mx.get_peak_memory() <= 1.3 * estimate


def test_memory_of_a_folder_is_that_of_the_same_file() -> None:
    folder = Path(__file__).parents[1] / "fixtures" / "pard"
    file = folder / "model.gguf"
    assert estimate_training_bytes(file, 1024) == estimate_training_bytes(folder, 1024)
    assert estimate_training_bytes(file, 1024, rank=8) < estimate_training_bytes(file, 1024)
    assert estimate_training_bytes(file, 1024) < estimate_training_bytes(file, 2048)
