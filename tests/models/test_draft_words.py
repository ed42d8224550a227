"""What --draft asks for: names, references and paths, what is joined, and what is refused."""

from __future__ import annotations

import pytest

from edgespec.backends.attached_draft import SelfDraftSpec
from edgespec.drafters.registry import drafter_specs
from edgespec.errors import InvalidRequest, UnknownModel
from edgespec.models.draft_words import describe_words, list_words, name_cures, naming_drafters, parse_draft
from edgespec.models.drafts import DrafterPlan


def names(text: str) -> list[tuple[str, str | None]]:
    """(drafter, reference) of each term."""
    return [(term.spec.name, term.reference) for term in parse_draft(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("none", []),
        ("ngram", [("ngram", None)]),
        ("model", [("model", None)]),
        ("pard", [("pard", None)]),
        ("ngram+model", [("ngram", None), ("model", None)]),
        ("pard+model+ngram", [("pard", None), ("model", None), ("ngram", None)]),
        ("pard:user/repo:Q8_0", [("pard", "user/repo:Q8_0")]),
        ("model:./draft.gguf+pard:hf:a/b/c.gguf", [("model", "./draft.gguf"), ("pard", "hf:a/b/c.gguf")]),
        ("ngram+./draft.gguf", [("ngram", None), ("model", "./draft.gguf")]),
        ("./draft.gguf+ngram", [("model", "./draft.gguf"), ("ngram", None)]),
        ("user/repo:Q4_K_M", [("model", "user/repo:Q4_K_M")]),
        ("package:python-6m/draft.gguf", [("model", "package:python-6m/draft.gguf")]),
    ],
)
def test_names_and_references(text: str, expected: list[tuple[str, str | None]]) -> None:
    assert names(text) == expected


@pytest.mark.parametrize("path", ["./a+b.gguf", "a+b+c/draft.gguf", "/models/c++/draft.gguf"])
def test_a_path_may_contain_a_plus(path: str) -> None:
    assert names(path) == [("model", path)]
    assert names(f"ngram+{path}") == [("ngram", None), ("model", path)]
    assert names(f"{path}+ngram") == [("model", path), ("ngram", None)]
    assert names(f"model:{path}") == [("model", path)]


def test_methods_of_self_drafting_make_one_drafter() -> None:
    assert parse_draft("layerskip:4+qspec") == [
        DrafterPlan(drafter_specs()["self"], self_draft=SelfDraftSpec(range(4), bits=0))
    ]
    ngram, own = parse_draft("ngram+layerskip:4+qspec:3")
    assert (ngram.spec.name, own.spec.name, str(own.self_draft)) == ("ngram", "self", "layerskip:4+qspec:3")
    assert [str(term.self_draft) for term in parse_draft("qspec:3+ngram+skip:4")] == ["layerskip:4+qspec:3", "None"]
    (search,) = parse_draft("layerskip")
    assert search.self_draft == SelfDraftSpec(())


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("ngram+ngram", "the draft 'ngram+ngram' names 'ngram' twice."),
        ("model+ngram+model:./a.gguf", "the draft 'model+ngram+model:./a.gguf' names 'model' twice."),
        ("model+./a.gguf", "the draft 'model+./a.gguf' names 'model' twice."),
        ("ngram:3", "the drafter 'ngram' takes no options."),
        ("model+ngram:", "the drafter 'ngram' takes no options."),
        ("auto+ngram", "'auto' cannot be joined with other drafters."),
        ("model+none", "'none' cannot be joined with other drafters."),
        ("ngram+", "the draft 'ngram+' leaves a drafter out."),
        ("", "the draft '' leaves a drafter out."),
        ("ngram+layerskip:0", "'layerskip:0' is not a self-draft."),
    ],
)
def test_what_is_refused_in_one_sentence(text: str, told: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_draft(text)
    assert caught.value.message == told and caught.value.hint


@pytest.mark.parametrize(
    ("word", "meant"),
    [("qspek", "qspec"), ("ngrm", "ngram"), ("modle", "model"), ("layerskp:3", "layerskip"), ("pared", "pard"),
     ("non", "none")],
)  # fmt: skip
def test_a_mistyped_drafter_is_a_reference_whose_refusal_lists_the_drafters(word: str, meant: str) -> None:
    assert names(word) == [("model", word)]
    with pytest.raises(UnknownModel) as caught, naming_drafters(word):
        raise UnknownModel("There is no such model.", hint="Another hint.")
    assert caught.value.message == f"no drafter is called '{word}', and there is no such model."
    assert caught.value.hint.startswith(f"Did you mean {meant}? Drafters: ")
    assert all(each in caught.value.hint for each in ("ngram", "model", "pard", "layerskip", "`edgespec list`"))


@pytest.mark.parametrize("reference", [None, "user/repo", "./ngrm", "ngrm.GGUF"])
def test_a_path_or_a_repository_was_meant_as_a_model(reference: str | None) -> None:
    with pytest.raises(UnknownModel) as caught, naming_drafters(reference):
        raise UnknownModel("There is no such model.", hint="Check the path.")
    assert caught.value.hint == "Check the path."


def test_the_words_of_all_drafters_are_listed_with_their_options() -> None:
    assert {spec.name for _, spec in list_words()} == set(drafter_specs())
    assert all(parse_draft(word)[0].spec is spec for word, spec in list_words())
    shown = describe_words()
    heads = "mtp[:REF], eagle3[:REF], eagle[:REF], dflash[:REF], dspark[:REF], medusa[:REF], hydra[:REF]"
    assert shown.startswith(
        "auto, none, ngram, suffix, recycling, lookahead[:W,N,G], model[:REF], pard[:REF], layerskip[:K], "
    )
    assert f", {heads} (trained heads of the target), or a model" in shown
    assert " skip" not in shown


@pytest.mark.parametrize(
    ("name", "cures"),
    [
        (
            "model",
            "`edgespec adapt` trains it on your texts, `edgespec draft train` makes a head for the model, --draft",
        ),
        ("pard", "`edgespec draft train` makes a head for the model, --draft"),
        ("eagle3", "`edgespec adapt` trains it on your texts, --draft"),
        ("dflash", "--draft"),
    ],
)
def test_cures_are_those_that_are_not_refused(name: str, cures: str) -> None:
    assert name_cures(drafter_specs()[name]) == f"{cures} ngram leaves it out"
