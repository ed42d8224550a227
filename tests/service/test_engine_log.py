"""What the output of an engine process tells of its end."""

from __future__ import annotations

import pytest

from edgespec.service.link import find_last_words


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ""),
        ("loading\n\nterminate called after 'std::bad_alloc'\n  what():  bad_alloc\n", "what():  bad_alloc"),
        ("x.cpp:9: GGML_ASSERT(a) failed\n#0  at wait4.c:30\n30\tin wait4.c\n", "x.cpp:9: GGML_ASSERT(a) failed"),
        ("ggml_cuda: out of memory\nloading\nFatal Python error: Aborted\n\nTypeError\n", "ggml_cuda: out of memory"),
        ("Traceback\n  File 'a'\nValueError: no such shape.\n", "ValueError: no such shape"),
        ("no word of it\nnor here\n", "nor here"),
    ],
)
def test_last_words(text: str, words: str) -> None:
    assert find_last_words(text) == words
