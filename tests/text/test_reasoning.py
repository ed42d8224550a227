"""Reasoning is separated from the answer, for each family of markers and any cut of the stream."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.text.reasoning import ReasoningFormat, ReasoningSplitter, Segment, detect_format

TEMPLATES = {
    "think": "{{ m.content.split('</think>')[-1] }}{% if t %}<think>\n{% endif %}",
    "thinking": "in <thinking> and </thinking> tags",
    "mistral": "[THINK]{{ m.thinking }}[/THINK]",
    "seed": "{% set begin = '<seed:think>' %}{% set end = '</seed:think>' %}",
    "minimax": "<mm:think>{{ m.reasoning }}</mm:think>",
    "cohere": "<|START_THINKING|>{{ m.plan }}<|END_THINKING|>",
    "gemma": "<|channel>thought\n<channel|>",
    "harmony": "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>",
    "solar": "<|begin|>assistant<|think|>{{ m.reasoning }}<|end|><|begin|>assistant<|content|>",
}
# What a model writes, and what of it is reasoning and answer.
REPLIES = {
    "think": ("<think>\nwhy\n</think>\n\nbecause", "\nwhy\n", "\n\nbecause"),
    "thinking": ("<thinking>why</thinking>because", "why", "because"),
    "mistral": ("[THINK]why[/THINK]be[THINK]cause[/THINK]cause", "whycause", "because"),
    "seed": ("<seed:think>why</seed:think>because", "why", "because"),
    "minimax": ("<mm:think>why</mm:think>because", "why", "because"),
    "cohere": ("<|START_THINKING|>why<|END_THINKING|>because", "why", "because"),
    "gemma": ("<|channel>thought\nwhy<channel|>because", "why", "because"),
    "harmony": (
        "<|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>commentary to=functions.analysis "
        "<|constrain|>json<|message|>be<|end|><|start|>assistant<|channel|>final<|message|>cause<|return|>",
        "why",
        "because",
    ),
    "solar": ("<|think|>why<|end|><|begin|>assistant<|content|>because", "why", "because"),
}


def known(name: str) -> ReasoningFormat:
    found = detect_format(TEMPLATES[name])
    assert found is not None
    assert found.name == name
    return found


def split(form: ReasoningFormat | None, chunks: list[str], *, inside: bool = False) -> list[Segment]:
    splitter = ReasoningSplitter(form, "reasoning" if inside else "answer")
    return [segment for chunk in chunks for segment in splitter.push(chunk)] + splitter.finish()


def texts(segments: list[Segment]) -> tuple[str, str]:
    reasoning = "".join(s.text for s in segments if s.channel == "reasoning")
    return reasoning, "".join(s.text for s in segments if s.channel == "answer")


def cut(data: st.DataObject, text: str) -> list[str]:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)))))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=40)
@given(data=st.data())
def test_each_family(name: str, data: st.DataObject) -> None:
    reply, reasoning, answer = REPLIES[name]
    assert texts(split(known(name), cut(data, reply))) == (reasoning, answer)


@pytest.mark.parametrize("name", TEMPLATES)
def test_block_opened_by_the_prompt(name: str) -> None:
    form, (reply, reasoning, answer) = known(name), REPLIES[name]
    at = reply.index(reasoning[:3])
    assert form.starts_inside("<|user|>hi<|assistant|>" + reply[:at] + "\n")
    assert not form.starts_inside("<|user|>hi<|assistant|>")
    assert not form.starts_inside(reply[: at + 3])
    assert texts(split(form, list(reply[at:]), inside=True)) == (reasoning, answer)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("is_inside", [False, True])
def test_an_answer_is_written_as_its_model_writes_it(name: str, is_inside: bool) -> None:
    """What was split can be put together again: the model goes on where it was."""
    form = known(name)
    for reasoning, answer in (("why", "be"), ("why", ""), ("", "be"), ("", "")):
        written = form.write(reasoning, answer, is_inside=is_inside)
        assert texts(split(form, [written], inside=is_inside)) == (reasoning, answer)
        went_on = texts(split(form, [written, "cause"], inside=is_inside))
        in_reasoning = not answer and (reasoning or is_inside)
        assert went_on == ((reasoning + "cause", "") if in_reasoning else (reasoning, answer + "cause"))
    if not is_inside and name not in ("mistral", "harmony"):  # those of the table have several blocks or a header
        assert form.write(*REPLIES[name][1:], is_inside=False) == REPLIES[name][0]


@given(st.data(), st.sampled_from(sorted(TEMPLATES)))
def test_any_text_in_any_cut(data: st.DataObject, name: str) -> None:
    """Segments cover the stream, in order; those without a channel are markers; cutting changes nothing."""
    form = known(name)
    parts = st.lists(st.sampled_from(sorted(form.markers)) | st.text(" a<|/t", max_size=3), max_size=10)
    text = "".join(data.draw(parts))
    inside = data.draw(st.booleans())
    segments = split(form, cut(data, text), inside=inside)
    assert all(segment.text for segment in segments)
    assert "".join(segment.text for segment in segments) == text
    assert texts(segments) == texts(split(form, [text], inside=inside))
    if name not in ("harmony", "solar"):  # these also have message headers
        assert {segment.text for segment in segments if segment.channel is None} <= form.markers


@given(st.lists(st.text("<think>/ a")))
def test_without_a_format_all_is_answer(chunks: list[str]) -> None:
    chunks = [*chunks, "<think>", "[THINK]"]
    segments = split(None, chunks, inside=True)
    assert texts(segments) == ("", "".join(chunks))
    assert "".join(s.text for s in ReasoningSplitter(None).push("a <think")) == "a <think"  # nothing waits


def test_an_answer_may_speak_of_markers() -> None:
    text = "Write `<think>` first.</think>"
    assert texts(split(known("think"), list(text))) == ("", text)


def test_marker_that_never_comes_is_text() -> None:
    assert texts(split(known("think"), ["<thi"])) == ("", "<thi")
    assert texts(split(known("think"), ["a</thi"], inside=True)) == ("a</thi", "")


def test_empty_block_in_the_prompt_is_closed() -> None:
    assert not known("think").starts_inside("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not known("gemma").starts_inside("<|turn>model\n<|channel>thought\n<channel|>")


@pytest.mark.parametrize("source", ["", "{{ m.content }}", "thinking is fun", "<|channel|>"])
def test_no_format(source: str) -> None:
    assert detect_format(source) is None
