"""The rows of the list of models that a filter leaves."""

from __future__ import annotations

from edgespec.tui.picker import Row, filter_rows


def test_typed_words_find_rows() -> None:
    described = {"python-6m": "Embedded pair", "qwen-x": "Großes Modell, 4-bit", "llama-x": ""}
    rows = [Row(name, name, "", "", "", "", "", "", text) for name, text in described.items()]
    texts = ("", "  ", "-x", "QWEN", "4-bit", "modell QWEN", "grosses", "qwen llama", "embedded pair")
    found = {text: [row.name for row in filter_rows(rows, text)] for text in texts}
    every = [*described]
    assert found == {"": every, "  ": every, "-x": every[1:], "QWEN": ["qwen-x"], "4-bit": ["qwen-x"],
                     "modell QWEN": ["qwen-x"], "grosses": ["qwen-x"], "qwen llama": [],
                     "embedded pair": ["python-6m"]}  # fmt: skip
