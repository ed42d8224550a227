"""Derives how a model writes calls from what its template makes of calls with known names and arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from edgespec.text.call_format import (
    ID,
    INDEX,
    KEY,
    NAME,
    TYPE,
    CallFormat,
    JsonArguments,
    LiteralArguments,
    TaggedArguments,
)

NAMES = ("probetoola", "probetoolb")
IDS = ("probeida1", "probeidb2")  # nine letters and digits, as Mistral's templates demand
ANSWER = "probeanswer"
_KEYS = ("probekeya", "probekeyb")
_TEXTS = ("probetexta", "probetextb")
_NUMBER = 41421

CALLS: Mapping[str, tuple[dict[str, Any], ...]] = {
    "strings": (dict(zip(_KEYS, _TEXTS, strict=True)),),
    "mixed": ({_KEYS[0]: _TEXTS[0], _KEYS[1]: _NUMBER},),
    "empty": ({},),
    "two": ({_KEYS[0]: _TEXTS[0]}, {_KEYS[0]: _TEXTS[1]}),
}
"""The arguments of the calls of each rendering from which a format is derived."""

_TAG = re.compile(r"<[^<>]*>|\[[^\[\]\s]*[\[\]]")


def derive(rendered: Mapping[str, str], opened: str, behind_answer: str) -> CallFormat | None:
    """The format of calls, from `rendered`: the renderings of conversations with CALLS, by their names. None if they do
    not tell it.

    `opened` is the prompt for the same question without an answer, `behind_answer` the text that follows an answer
    without calls. The rendering "said", if there is one, has the answer ANSWER in front of the calls of "strings".
    """
    found = {name: each for name, text in rendered.items() if (each := _locate(text, opened)) is not None}
    if "strings" not in found:
        return None
    around = _Around(found, behind_answer)
    return _derive_json(found, around) or _derive_marked(found, around)


@dataclass(frozen=True)
class _Written:
    """The calls of one rendering: its text with signs for ids, where the answer starts, and the span of each name."""

    text: str
    start: int
    names: tuple[tuple[int, int], ...]

    @property
    def lead(self) -> str:
        """The text of the answer in front of the first name."""
        return self.text[self.start : self.names[0][0]]

    def behind_name(self, i: int = 0) -> str:
        """The text behind a name, with signs for keys."""
        text = self.text[self.names[i][1] :]
        for key in _KEYS:
            text = text.replace(key, KEY)
        return text


def _locate(text: str, opened: str) -> _Written | None:
    """Find the calls in a rendering; None if it has none."""
    for call_id in IDS:
        text = text.replace(call_id, ID)
    start = len(_common_start(text, opened))
    if text.rfind("<", 0, start) > text.rfind(">", 0, start):
        start = text.rindex("<", 0, start)  # both go on with a tag
    names: list[tuple[int, int]] = []
    for name, other in zip(NAMES, reversed(NAMES), strict=True):  # of several, the one next to the arguments counts
        if (at := text.find(name, names[-1][1] if names else start)) < 0:
            break
        limits = [text.find(each, at) for each in (_KEYS[0], other)]
        at = text.rfind(name, at, min((limit for limit in limits if limit >= 0), default=len(text)))
        names.append((at, at + len(name)))
    return _Written(text, start, tuple(names)) if names else None


class _Around:
    """Finds what stands around calls, between calls and around the calls of an answer."""

    def __init__(self, found: Mapping[str, _Written], behind_answer: str) -> None:
        self._ends = _TAG.findall(behind_answer)
        self.lead = found["strings"].lead
        self.address = ""
        said = found.get("said")
        if said is not None and ANSWER in said.lead:  # what is in front of calls alone belongs to reasoning
            self.lead = _from_tag(_common_end(self.lead, said.lead.rpartition(ANSWER)[2]))
            self.address = _to_tag(_common_start(self.lead, behind_answer))  # what ends an answer leads to calls
            self.lead = self.lead.removeprefix(self.address)
            self.address = self.address if self.address.strip() else ""
        self.lead = self.lead.lstrip().replace(NAMES[0], NAME)

    def cut(self, text: str, ends: Iterable[str] | None = None) -> str:
        """`text` up to the first tag that ends a turn."""
        found = [at for end in (self._ends if ends is None else ends) if (at := text.find(end)) >= 0]
        return text[: min(found, default=len(text))].rstrip()

    def close(self, made: CallFormat, tail: str) -> CallFormat:
        """A format with one call in an answer, which `tail` follows."""
        if isinstance(made.arguments, TaggedArguments):
            made = replace(made, arguments=replace(made.arguments, empty=self.cut(made.arguments.empty)))
        return self._address(replace(made, before=self.lead, after=self.cut(tail)))

    def divide(self, made: CallFormat, inner: str, tail: str, second_middle: str) -> CallFormat:
        """A format with several calls: `inner` stands between the first arguments and the second name, `second_middle`
        behind that name, and `tail` behind the last arguments.
        """
        middle, lead, inner = _sign_numbers(made.middle, second_middle, self.lead, inner.replace(NAMES[1], NAME))
        before = _from_tag(_common_end(lead, inner))
        first, inner = lead.removesuffix(before), inner.removesuffix(before)
        after = _to_tag(_common_start(inner, tail))
        ends = [tag for tag in self._ends if tag not in lead + inner]
        last = self.cut(tail.removeprefix(after), ends) if first.strip() else ""
        arguments = made.arguments
        if isinstance(arguments, TaggedArguments):
            empty = self.cut(arguments.empty, ends).removesuffix(last)
            empty = middle + empty.removeprefix(made.middle)
            arguments = replace(arguments, empty=empty)
        made = replace(made, first=first, before=before, middle=middle, arguments=arguments, after=after)
        return self._address(replace(made, between=inner.removeprefix(after), last=last))

    def _address(self, made: CallFormat) -> CallFormat:
        """The format with what leads to calls, such as their recipient."""
        found = re.match(rf".*{NAME}[^<]*<\|[^|>]*\|>", made.before, re.DOTALL)
        if found is None:
            return replace(made, address=self.address)
        return replace(made, address=found[0], before=made.before[found.end() :])


def _sign_numbers(middle: str, second_middle: str, lead: str, inner: str) -> tuple[str, str, str]:
    """The texts with signs for the number of the call, which counts from 0 or 1."""
    for base in (0, 1):
        one, two = (re.compile(rf"(?<!\w){base + i}(?!\w)") for i in (0, 1))
        signed = one.sub(INDEX, middle)
        if INDEX in signed and signed == two.sub(INDEX, second_middle):
            return signed, lead, inner
        signed_lead, signed_inner = one.sub(INDEX, lead), two.sub(INDEX, inner)
        if INDEX in _common_end(signed_lead, signed_inner):
            return middle, signed_lead, signed_inner
    return middle, lead, inner


def _derive_json(found: Mapping[str, _Written], around: _Around) -> CallFormat | None:
    """The format of calls whose arguments are a JSON object."""
    strings, two = found["strings"], found.get("two")
    if (span := _find_json(strings, CALLS["strings"][0])) is None:
        return None
    made = CallFormat(middle=strings.text[strings.names[0][1] : span[0]], arguments=JsonArguments())
    tail = strings.text[span[1] :]
    if two is None or len(two.names) < 2 or (first := _find_json(two, CALLS["two"][0])) is None:
        return around.close(made, tail)
    second_middle = two.behind_name(1).partition("{")[0]
    if (second := _find_json(two, CALLS["two"][1])) is not None:
        tail = two.text[second[1] :]  # of several calls, since some templates close them alone
    return around.divide(made, two.text[first[1] : two.names[1][0]], tail, second_middle)


def _find_json(written: _Written, arguments: object) -> tuple[int, int] | None:
    """Start and end of the JSON of `arguments` behind the first name."""
    at = written.text.find("{", written.names[0][1])
    while at >= 0:
        try:
            value, end = json.JSONDecoder().raw_decode(written.text, at)
        except ValueError:
            value, end = None, at
        if value == arguments:
            return at, end
        at = written.text.find("{", at + 1)
    return None


def _derive_marked(found: Mapping[str, _Written], around: _Around) -> CallFormat | None:
    """The format of calls whose arguments stand between tags, or are literals."""
    strings, mixed, empty = found["strings"], found.get("mixed"), found.get("empty")
    texts = re.split("|".join(_TEXTS), strings.behind_name())
    if mixed is None or empty is None or len(texts) != 3 or str(_NUMBER) not in mixed.text:
        return None
    (to_key, _, mark), inner, tail = texts[0].partition(KEY), texts[1].rpartition(KEY)[0], texts[2]
    if inner.count(KEY) and KEY not in tail:
        return None
    other = mixed.behind_name().partition(str(_NUMBER))[0].rpartition(KEY)[2]
    quote = mark.removeprefix(other)
    if other and quote.strip() and quote != mark and tail.startswith(quote):
        literals = LiteralArguments(other, quote, inner.removeprefix(quote))
        return _join(CallFormat(middle=to_key, arguments=literals), quote, "", found, around, tail)
    if mark.replace("string", TYPE) == other.replace("number", TYPE):
        other = other.replace("number", TYPE)
    key = _from_tag(_common_end(to_key, inner))
    inner = inner.removesuffix(key)
    end = _to_tag(_common_start(inner, tail))
    tags = TaggedArguments(key, mark, other, end, inner.removeprefix(end), empty.behind_name())
    return _join(CallFormat(middle=to_key.removesuffix(key), arguments=tags), end, key, found, around, tail)


def _join(
    made: CallFormat, end: str, key: str, found: Mapping[str, _Written], around: _Around, tail: str
) -> CallFormat:
    """The format with what stands around its calls; `end` stands behind a value, and `key` in front of a key."""
    tail, two = tail.removeprefix(end), found.get("two")
    if two is None or len(two.names) < 2:
        return around.close(made, tail)
    text = two.text[: two.names[1][0]].replace(_KEYS[0], KEY)
    inner = text.partition(_TEXTS[0])[2].removeprefix(end)
    return around.divide(made, inner, tail, two.behind_name(1).partition(KEY)[0].removesuffix(key))


def _common_start(a: str, b: str) -> str:
    n = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[:n]


def _common_end(a: str, b: str) -> str:
    return _common_start(a[::-1], b[::-1])[::-1]


def _from_tag(text: str) -> str:
    """`text` without the end of a tag at its beginning."""
    closing, opening = text.find(">"), text.find("<")
    return text[closing + 1 :] if 0 <= closing < opening else text


def _to_tag(text: str) -> str:
    """`text` without the beginning of a tag at its end."""
    return text[: text.rindex("<")] if text.rfind("<") > text.rfind(">") else text
