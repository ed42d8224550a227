"""The HTML report: nothing from outside, names are text, figures are the summary's, and little data is no obstacle."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from edgespec.bench.runner import Cost, Header, Run
from edgespec.bench.summary import summarize, write_report
from edgespec.controller.cost_model import DraftCost
from edgespec.errors import CacheError
from tests.bench.lines import COST, FAULT, HEADER, HINDSIGHT, NEAR_TIE, run

VOID = {"meta", "br", "img", "link", "input", "hr"}
HOSTILE = "<script>alert(1)</script>\"'><img src=//x onerror=alert(1)> $\\frac{1}$ &amp; \x1b\u202e\ud800 漢字"
HOSTILE_TEXT = HOSTILE.replace("\x1b", "\ufffd").replace("\u202e", "\ufffd").replace("\ud800", "\ufffd")


class Page(HTMLParser):
    """Elements, text by element, and rows of tables of a page whose elements have to be nested properly."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.rows: list[list[str]] = []
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open:
            self.texts.append((self._open[-1], data))
        if "tr" in self._open:
            self.rows[-1][-1] += data

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def text_of(self, tag: str) -> str:
        return "\n".join(text for name, text in self.texts if name == tag)


def report(folder: Path, *runs: Run, header: Header = HEADER, costs: Sequence[Cost] = (COST,)) -> str:
    write_report(summarize([header, *costs, *runs]), folder / "bench.html")
    return (folder / "bench.html").read_text(encoding="utf-8")


def hindsight() -> list[Run]:
    drafted = {"drafted_tokens": 20, "accepted_tokens": 10, "alpha_by_depth": [0.5, 0.5]}
    return [
        run(arm, prompt, speed, **({} if arm == "plain" else drafted))
        for prompt, speeds in HINDSIGHT.items()
        for arm, speed in speeds.items()
    ]


def test_nothing_comes_from_outside(tmp_path: Path) -> None:
    html = report(tmp_path, *hindsight())
    page = Page(html)
    assert not {"script", "link", "img", "iframe", "object", "image"} & {tag for tag, _ in page.elements}
    defined = {attributes["id"] for _, attributes in page.elements if "id" in attributes}
    for tag, attributes in page.elements:
        assert "src" not in attributes
        assert not [name for name in attributes if name.startswith("on")]
        if tag == "use" or "href" in attributes:
            assert str(attributes["href"]).removeprefix("#") in defined
    assert "url(" not in html
    assert "@import" not in html


@pytest.mark.filterwarnings("error")
def test_names_are_text(tmp_path: Path) -> None:
    texts = dict.fromkeys(("model", "draft", "label", "processor", "system", "date", "backend"), HOSTILE)
    header = replace(HEADER, **texts, versions={HOSTILE: HOSTILE}, files={HOSTILE: HOSTILE})
    arms = ("plain", "autopilot", HOSTILE + " 3", "\x1b\ud800漢 <i> 3")
    lines = [run(arm, HOSTILE, 10, category=HOSTILE, alpha_by_depth=[0.5]) for arm in arms]
    html = report(tmp_path, *lines, header=header)
    page = Page(html)
    assert not {"script", "img"} & {tag for tag, _ in page.elements}
    assert page.text_of("h1") == HOSTILE_TEXT
    assert HOSTILE_TEXT in page.text_of("b")
    assert HOSTILE_TEXT + " 3" in [row[0] for row in page.rows]
    assert "\ufffd\ufffd漢 <i> 3" in [row[0] for row in page.rows]
    assert "\x1b" not in html


def test_tables_hold_the_summary(tmp_path: Path) -> None:
    page = Page(report(tmp_path, *hindsight()))
    rows = [[cell.strip() for cell in row] for row in page.rows]
    assert ["autopilot", "2", "1.41 1.10\u20131.80", "1.17", "0%", "1.00", "50%", "14.5 12.8\u201316.2"] in rows
    assert ["plain", "2", "1.00 1.00\u20131.00", "1.00", "0%", "1.00", "-", "10.0 10.0\u201310.0"] in rows
    assert ["chat", "2", "1.41 1.10\u20131.80", "1.17", "0%", "1.00", "50%", "14.5 12.8\u201316.2"] in rows
    assert ["ngram 7", "0.50", "0.50"] in rows
    assert ["64", "20.0", "1.00", "1.50"] in rows, "lookups take no time"
    facts = list(zip(page.text_of("dt").split("\n"), page.text_of("dd").split("\n"), strict=True))
    assert ("best fixed (with hindsight)", "model 3") in facts
    assert ("autopilot / best fixed", "1.17 (0.92-1.50)") in facts
    assert ("digests (size and both ends)", "target.gguf f4ada450") in facts
    assert ("versions", "edgespec 0.1.0") in facts
    assert ("threads", "1") in facts


def test_the_price_of_every_drafter_is_in_the_table(tmp_path: Path) -> None:
    """A token of a sequential one, a block by its tokens; one that joined later has no price at the first position."""
    drafts = {"model": DraftCost({1: 0.004}, 0.001), "pard": DraftCost({1: 0.005, 4: 0.0061}, 0.001)}
    later = replace(COST, position=128, drafts={**drafts, "own-head": DraftCost({1: 0.0007}, 0.0)})
    html = report(tmp_path, costs=(replace(COST, drafts=drafts), later))
    rows = [[cell.strip() for cell in row] for row in Page(html).rows]
    assert ["position", "T(1), ms", "model, ms", "pard, ms", "own-head, ms", "1", "2"] in rows
    assert ["64", "20.0", "4.0", "1: 5.0, 4: 6.1", "-", "1.00", "1.50"] in rows
    assert ["128", "20.0", "4.0", "1: 5.0, 4: 6.1", "0.7", "1.00", "1.50"] in rows


def test_every_colour_is_a_variable_in_light_and_in_dark(tmp_path: Path) -> None:
    html = report(tmp_path, *hindsight())
    light, dark = (set(re.findall(r"--([\w-]+):", block)) for block in re.findall(r":root \{(.*?)\}", html, re.S))
    used = set(re.findall(r"var\(--([\w-]+)\)", html))
    assert used <= light == dark
    assert "prefers-color-scheme: dark" in html


def test_the_label_is_on_top(tmp_path: Path) -> None:
    labelled = report(tmp_path, *hindsight(), header=replace(HEADER, label="cost-faithful 1B"))
    assert labelled.index('<p class="label"><b>cost-faithful 1B</b>') < labelled.index("<section>")
    assert 'class="label"' not in report(tmp_path, *hindsight())


@pytest.mark.parametrize(
    ("lines", "cost", "tables"),
    [
        ([], False, 0),
        ([], True, 1),
        ([run("plain", "a", 10)], False, 2),
        ([run("plain", "a", None), run("autopilot", "a", None)], False, 3),
        ([run("autopilot", "a", 10)], False, 3),
        ([run("plain", "a", 10), run("autopilot", "a", 20)], False, 3),
        ([run("plain", "a", 10), run("ngram 3", "a", 5, drafted_tokens=9, alpha_by_depth=(0.0,))], False, 3),
    ],
)
def test_little_data(tmp_path: Path, lines: list[Run], cost: bool, tables: int) -> None:
    page = Page(report(tmp_path, *lines, costs=(COST,) if cost else ()))
    assert len(page.named("table")) == tables
    assert page.text_of("h1") == "python-6m"


def test_faults_are_told(tmp_path: Path) -> None:
    """In one sentence, which is left out where rounding explains all forks."""
    told = "differ{} from plain decoding's where the target has no near-tie: a fault, not rounding."
    faults = [run("ngram 3", prompt, 10, fork=FAULT) for prompt in "ab"]
    assert f'<p class="fault">1 output {told.format("s")}</p>' in report(tmp_path, faults[0])
    assert f'<p class="fault">2 outputs {told.format("")}</p>' in report(tmp_path, *faults)
    assert '<p class="fault">' not in report(tmp_path, run("ngram 3", "a", 10, fork=NEAR_TIE))


def test_a_report_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(CacheError, match="cannot write"):
        write_report(summarize([HEADER]), tmp_path / "none" / "bench.html")
