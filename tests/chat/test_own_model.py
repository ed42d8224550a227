"""The model that a conversation is continued with."""

from __future__ import annotations

import pytest

from edgespec.chat import Store
from edgespec.chat.own_model import OwnModel


@pytest.mark.parametrize("own", [OwnModel(None), OwnModel("/models/a.gguf", "ngram+model:b", "llamacpp")])
def test_the_last_answer_names_it(store: Store, own: OwnModel) -> None:
    conversation = store.new("a name")
    assert OwnModel.find(conversation, store.turns(conversation)) == OwnModel("a name"), "nothing else is known"
    question = store.add(conversation, None, "user", "Why?")
    for settings in (
        {"draft": "none"},
        {"opened": {"reference": 1}},
        {"opened": "x"},
        OwnModel("before").to_settings(),
    ):
        store.add(conversation, question, "assistant", "", settings)
    assert OwnModel.find(conversation, store.turns(conversation)[:-1]) == OwnModel("a name")
    store.add(conversation, question, "assistant", "", own.to_settings())
    store.add(conversation, None, "user", "Why not?")
    assert OwnModel.find(conversation, store.turns(conversation)) == own
