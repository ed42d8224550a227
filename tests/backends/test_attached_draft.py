"""What may be asked of a model's drafts of itself, in words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.backends.attached_draft import SelfDraftSpec, parse
from edgespec.errors import InvalidRequest

skips = st.one_of(
    st.just(()),
    st.integers(1, 99).map(range),
    st.sets(st.integers(0, 99), min_size=2).map(lambda layers: tuple(sorted(layers))),
)
methods = st.builds(
    SelfDraftSpec,
    kept=st.none() | skips,
    bits=st.none() | st.sampled_from([0, 2, 3, 4, 5, 6]),
    sparse=st.none() | st.tuples(st.integers(0, 64), st.integers(1, 4096)),
).filter(lambda method: method != SelfDraftSpec())


@given(methods)
def test_what_a_method_is_called_is_understood(method: SelfDraftSpec) -> None:
    assert parse(str(method)) == method


@pytest.mark.parametrize(
    ("text", "method"),
    [
        ("layerskip", SelfDraftSpec(())),
        ("skip:0,1,5+qspec:3", SelfDraftSpec((0, 1, 5), bits=3)),
        ("qspec+skip:4", SelfDraftSpec(range(4), bits=0)),
        ("sparse", SelfDraftSpec(sparse=(4, 256))),
        ("auto", None),
        ("ngram", None),
        ("planes", None),
        ("llama-1b", None),
        ("org/qspec-8b-GGUF:Q4_K_M", None),
        ("./sparse.gguf", None),
    ],
)
def test_parse(text: str, method: SelfDraftSpec | None) -> None:
    assert parse(text) == method


@pytest.mark.parametrize(
    "text",
    [
        "layerskip:",
        "layerskip:0",
        "layerskip:3,1",
        "layerskip:1,1",
        "layerskip:-1",
        "layerskip:x",
        "qspec:1",
        "qspec:7",
        "qspec:2,3",
        "sparse:4",
        "sparse:4,0",
        "sparse:1,2,3",
        "sparse:1048576,1",
        "layerskip+layerskip",
        "qspec:2+qspec:3",
    ],
)
def test_what_is_nearly_a_method_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        parse(text)


def test_layers_of_a_model() -> None:
    assert SelfDraftSpec(range(2)).layers(6) == (0, 1)
    assert SelfDraftSpec((0, 5)).layers(6) == (0, 5)
    assert SelfDraftSpec(bits=4).layers(3) == (0, 1, 2)
    for kept in (range(6), range(7), (0, 6), (0, 1)):
        with pytest.raises(InvalidRequest, match="the model has"):
            SelfDraftSpec(kept).layers(2 if kept == (0, 1) else 6)
