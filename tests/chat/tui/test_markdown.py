"""Awkward texts on the screen: nothing but markup is left out, and a text that grows looks as one that came at once."""

from __future__ import annotations

import random
import re

import pytest

from edgespec.chat.tui.blocks import MAX_COLUMNS, Block, CodeBlock, Document, Parse, paint, parse_plain, parse_python
from edgespec.chat.tui.markdown import list_code_blocks, parse_markdown
from edgespec.chat.tui.transcript import Answer, select_style
from edgespec.text.stream import Piece
from tests.gguf_models import REPOSITORY

POEM = "  Roses are red\n    Violets are blue  \nSugar\\\n Honey\n\n- one\n  two"
# Texts, and all of their characters that are no markup, without spaces.
CASES = {
    "<div>a</div> List<String>\n<details>\n<p>x</p>\n<!-- y -->": "<div>a</div>List<String><details><p>x</p><!--y-->",
    r"\(a*b*c\) \[x_1 * y\] $a_b*c$ $$z*z*z$$ 5$ or 6$": r"\(a*b*c\)\[x_1*y\]$a_b*c$$$z*z*z$$5$or6$",
    "\\[\na * b\n- c\n\\]\ntext": "\\[a*b-c\\]text",
    "a*b*c 2**3**4 (a)*(b)*(c) __init__ snake_case_name": "a*b*c2**3**4(a)*(b)*(c)__init__snake_case_name",
    r"C:\path\new \alpha \* \_": r"C:\path\new\alpha*_",
    POEM: "RosesareredVioletsareblueSugarHoney•onetwo",
    "**b *i* b** ***bi*** ~~gone~~ `a*b` **open": "bibbigonea*b**open",
    "- a\n  - b\n\n    c\n1. x\n2) y\n\n* \n* z\n- [ ] todo": "•a•bc1.x2)y••z•[]todo",
    "1986. A great year\n\n> q\n> > r\n> 7. s": "1986.Agreatyearqr7.s",
    "| a | b |\n|---|:-:|\n| 1 | `x` |\n| two words |": "ab1xtwowords",
    "| a | b |\n|---|---|\n| 1 | 2 | 3 |\n| 4 |\n> | a |\n> |---|\n> | 1 | `x\\|y` |": "ab1234a1`x|y`",
    "```py title\nopen = [fence]\n  x": "pytitle·1open=[fence]x",
    "~~~\n```\n~~~\n\n    code\n\tmore": "text·1```codemore",
    '[a](http://x.y "t") ![i](p.png) <http://z.z> [ref][r]\n\n[r]: http://d.d': 'a(http://x.y"t")i(p.png)http://z.z[ref][r]'
    "[r]:http://d.d",
    "&amp; &lt;tag&gt; &nope;": "&<tag>&nope;",
    "# one #\nTwo\n===\n###### six": "oneTwosix",
    "مرحبا بالعالم שלום": "مرحبابالعالمשלום",
    "漢字かな交じり文" * 30: "漢字かな交じり文" * 30,
    "👩‍👩‍👧 🇩🇪 é ｗｉｄｅ": "👩‍👩‍👧🇩🇪éｗｉｄｅ",  # noqa: RUF001
    "x" * 500 + " " + "word " * 100: "x" * 500 + "word" * 100,
    "[red]x[/red] [link=a]y[/link] $text-error": "[red]x[/red][link=a]y[/link]$text-error",
    "\x1b[31m a\x07 b\r\nc\u202fd": "␛[31ma␇bcd",
    "a\u202egpj.exe\u2069": "a‹U+202E›gpj.exe‹U+2069›",  # noqa: RUF001
}
BARS = re.compile(r"[\s▌│─┼]")
DOCUMENTS = [file.read_text() for file in sorted((REPOSITORY / "docs").glob("*.md"))]


def rows(blocks: list[Block], width: int) -> list[str]:
    return [row.content.plain.rstrip() for block in blocks for row in block.lay_out(width, block.content)]


def test_every_character_that_is_no_markup_is_on_the_screen() -> None:
    for width in (118, 28):
        for text, characters in CASES.items():
            answer = Answer()
            answer.show(text, "", [], "")
            assert BARS.sub("", "".join(rows(answer.blocks, width))) == BARS.sub("", characters), (width, text)


def test_a_broken_line_has_no_blanks_beyond_its_text() -> None:
    """They would be copied into the middle of the line."""
    line = "value = compute(first_argument, second_argument, third_argument)"
    (block,) = parse_markdown(f"```\n{line}\n```")[0]
    shown = [row for row in block.lay_out(40, block.content) if not row.is_end or row.content.plain.strip()][1:]
    assert len(shown) > 1 and "".join(row.content.plain[row.skip :] for row in shown).rstrip() == line


@pytest.mark.parametrize(
    "text", ["a\n\n\\[\nb * c\n- d\n\\]\n\ne", "- a\n\n$$\nb\n> c\n$$\n", "\\[\na\n- b\n\nc\n\\]\n"]
)
def test_a_formula_that_grows_may_look_like_other_blocks(text: str) -> None:
    """Wherever the text is cut."""
    for first in range(1, len(text)):
        for second in range(first, len(text)):
            document = Document(parse_markdown)
            for end in (first, second, len(text)):
                document.update(text[:end])
            assert document.blocks == parse_markdown(text, 0, 1)[0], (first, second)


@pytest.mark.parametrize("parse", [parse_markdown, parse_python, parse_plain], ids=["markdown", "code", "plain"])
def test_a_text_that_grows_ends_as_one_that_came_at_once(parse: Parse) -> None:
    cut = random.Random(1)
    for text in [*DOCUMENTS, *CASES, "\n\n".join(CASES)]:
        document, at = Document(parse), 0
        while at < len(text):
            at += cut.randint(1, 200)
            document.update(text[:at])
        assert document.blocks == parse(text, 0, 1)[0]
        assert all(block.height(80) == len(block.lay_out(80, block.content)) for block in document.blocks)


def test_lines_stay_lines_and_are_not_wider_than_can_be_read() -> None:
    assert rows(parse_markdown(POEM)[0], 80) == [
        "", "  Roses are red", "    Violets are blue", "Sugar", " Honey", "", "• one", "  two"
    ]  # fmt: skip
    verses = [row for row in rows(parse_markdown("    Deep\n  less\nnone")[0], 80) if row]
    assert verses == ["     Deep", "  less", "none"]
    for text in DOCUMENTS:
        blocks = [block for block in parse_markdown(text)[0] if type(block) is Block]
        assert max(map(len, rows(blocks, 200))) <= MAX_COLUMNS


def test_a_table_is_as_wide_as_its_longest_row() -> None:
    table = "| a | b |\n|---|---|\n| 1 | 2 | 3 |\n| 4 |"
    assert rows(parse_markdown(table)[0], 80) == ["", "a │ b │", "──┼───┼──", "1 │ 2 │ 3", "4 │   │"]


def test_code_blocks_have_the_numbers_by_which_they_are_copied() -> None:
    text = "```py\na\n```\n\n- x\n  ~~~\n  b\n  ~~~\n\n      no fence\n\n" + "```\n" + "c\n" * 500 + "```\n"
    blocks = [block for block in parse_markdown(text)[0] if isinstance(block, CodeBlock)]
    assert [block.title for block in blocks if block.title] == ["py · 1", "text · 2", "text · 3"]
    assert len(blocks) > 4, "long code is laid out in parts"
    assert list_code_blocks(text) == ["a\n", "b\n", "c\n" * 500]


def test_code_without_a_chat_template_is_code_and_prose_is_as_it_is() -> None:
    code = 'def __init__(self):\n    self.a = 2*3*4\n    return """\n\n# text"""\n'
    for text, is_code in ((code, True), ("It is *as it is*.\n# 1\n\n\n  __x__", False)):
        answer = Answer(is_raw=True)
        answer.show(text, "", [], "")
        assert all(isinstance(block, CodeBlock) is is_code for block in answer.blocks)
        assert [row.rstrip() for row in rows(answer.blocks, 80)[1:]] == text.removesuffix("\n").split("\n")


def test_origins_are_drawn_over_the_markdown() -> None:
    pieces = [("The ", ""), ("**two", "model"), (" words** ", "ngram"), ("&amp; `", ""), ("x", "model"),
              ("`\n\n    y\n\n- ", "ngram"), ("[a](b) ", ""), ("c\n", "model")]  # fmt: skip
    answer = Answer()
    answer.append([Piece(text, "answer", origin) for text, origin in pieces])
    answer.shows_origins = True
    drafted = []
    for block in answer.blocks[:3]:
        origins = answer.origins(block)
        content, styles = paint(block.content, origins), [style for _, style in origins]
        spans = [span for span in content.spans if span.style.endswith(" underline") and span.style in styles]
        drafted += [content.plain[span.start : span.end] for span in spans]
    assert drafted == ["two", " words ", "x", "y", "c"]


def test_text_without_spans_has_no_origin() -> None:
    """Of an imported answer that is continued."""
    answer = Answer()
    answer.show("old text", "", [], "")
    answer.append([Piece(", new text", "answer", "ngram")])
    answer.shows_origins = True
    (block,) = answer.blocks[:1]
    styles = dict(answer.origins(block))
    assert styles["old text"] == select_style("", 1) and styles[", new text"] == select_style("ngram", 1)


def test_empty_lines_between_stanzas_stay() -> None:
    """However the text came, by pieces or whole."""
    text = "One\ntwo\n\n\nthree\n\nfour\n\n\n\nfive"
    whole, grown = Answer(), Answer()
    whole.show(text, "", [], "")
    grown.append([Piece(each, "answer", "") for each in text])
    for answer in (whole, grown):
        assert [row.rstrip() for row in rows(answer.blocks, 80)[1:]] == text.split("\n")
