"""Text of users and tools that spells control tokens stays text."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from edgespec.text.control_text import ControlText
from edgespec.text.tokenizer import Tokenizer
from tests.text.conftest import SPECIALS, TableTokenizer

PIECES = [bytes([byte]) for byte in range(256)] + [b"</", b"s>", b"hello"]
TEXTS = st.lists(st.sampled_from([*SPECIALS, "hello", "<", "s>", " ", "ü", "\ufdd8"]), max_size=6).map("".join)


def tokens_and_text(tokenizer: Tokenizer, tokens: list[int]) -> tuple[list[int], bytes]:
    return [token for token in tokens if not tokenizer.piece(token)], b"".join(map(tokenizer.piece, tokens))


@given(texts=st.lists(TEXTS, min_size=1, max_size=4))
def test_only_the_templates_own_text_becomes_control_tokens(texts: list[str]) -> None:
    tokenizer = TableTokenizer(PIECES)
    control = ControlText(tokenizer)
    prompt = "".join(f"<s>{control.hide(text)}</s>" for text in texts)
    found, data = tokens_and_text(tokenizer, control.encode(prompt))
    assert found == [0, 1] * len(texts)
    assert data.decode() == "".join(texts).replace("\ufdd8", "\ufffd")
    assert control.show(prompt) == "".join(f"<s>{text}</s>" for text in texts).replace("\ufdd8", "\ufffd")


def test_other_prompts_are_encoded_as_before(table: Callable[..., Tokenizer]) -> None:
    tokenizer = table(PIECES)
    control = ControlText(tokenizer)
    text = "<s>hello</s><think>x"
    assert control.hide("hello <b>") == "hello <b>"
    assert control.encode(text) == tokenizer.encode(text, parse_special=True)


def test_signs_that_a_template_writes_as_json(table: Callable[..., Tokenizer]) -> None:
    control = ControlText(table(PIECES))
    hidden = control.hide({"a": ["</s>", 1], "</s>": None})
    assert control.show(str(hidden["a"][0]).encode("unicode_escape").decode()) == "</s>"
    assert hidden["a"][1] == 1 and list(hidden) == ["a", "</s>"]
