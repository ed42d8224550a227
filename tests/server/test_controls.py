"""What a request may decide of drafting, reasoning and the length of the answer, in every interface."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from edgespec.answers.generation_spec import GenerationSpec
from edgespec.answers.thinking import Thinking
from edgespec.autopilot.speculation import Speculation
from edgespec.text.chat_template import profile_template
from edgespec.text.template_probe import NO_TEMPLATE
from tests.gguf_models import llama
from tests.server.interfaces import CHAT, MESSAGES, RESPONSES, TEXT, make_body
from tests.server.serving import PROMPT, Server, serving

USER: list[Any] = [{"role": "user", "content": PROMPT}]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}{% endif %}"
)
ALWAYS = "{{ messages[0].content }}<think>\n{# </think> #}"
LEVELS = "Reasoning: {{ reasoning_effort }}<|channel|>analysis<|message|>{{ messages[0].content }}"
OFF = LEVELS.replace("Reasoning:", "{% if reasoning_effort != 'none' %}Reasoning:{% endif %}")
NO_END = {"logit_bias": {"0": -100}}


def test_lengths_of_drafts_at_the_same_time(toy: Server) -> None:
    """Any length gives the same text."""
    asked = [{"draft_max": 0}, {"speculative.n_max": 1}, {"draft_max": 9}, {"draft_max": 0}, {}] * 2
    with ThreadPoolExecutor(len(asked)) as pool:
        made = list(pool.map(lambda more: toy.ask("tree", max_tokens=80, **more).json(), asked))
    assert len({each["choices"][0]["message"]["content"] for each in made}) == 1
    off, one, nine, _, free = (each["timings"] for each in made[:5])
    assert (off["draft_n"], off["tau"]) == (0, 1) and free["draft_n"] > 0
    assert 0 < one["draft_n"] <= 79 / one["tau"] and nine["draft_n"] > one["draft_n"]


def test_lengths_of_drafts(pair: Server) -> None:
    """Of a draft model, which drafts as much as it may; 0 leaves no drafts of grammars either."""

    def timings(**more: Any) -> dict[str, Any]:
        return dict(pair.ask("embedded", max_tokens=24, **more).json()["timings"])

    one, two = timings(**{"speculative.n_max": 1}), timings(draft_max=2)
    assert one["draft_n"] <= 23 / one["tau"] and 1 < one["tau"] <= 2
    assert two["draft_n"] > one["draft_n"] and two["draft_n_accepted"] > 0
    most = pair.ask("embedded", max_tokens=24, draft_max=10_000).json()
    assert most["timings"]["draft_n"] > 23
    form = {"type": "json_schema", "json_schema": {"schema": {"type": "object", "properties": {"a": {"const": 17}}}}}
    assert timings(response_format=form, draft_max=0)["draft_n"] == 0
    native = {"model": "embedded", "prompt": PROMPT, "raw": True, "stream": False, "draft_max": 0}
    assert pair.post("/api/generate", json={**native, "options": {"num_predict": 9}}).json()["timings"]["draft_n"] == 0
    body = {"model": "embedded", "max_tokens": 9, "messages": USER, "draft_max": 0}
    assert pair.post("/v1/messages", json=body).json()["timings"]["draft_n"] == 0


def test_lengths_replace_those_of_the_server() -> None:
    plain, fixed, free = Speculation(), Speculation(("ngram",), 4, 9), Speculation(("ngram",))
    assert limit(0, fixed) == Speculation(("ngram",), 0) and limit(None, fixed) is None
    assert limit(3, free) == Speculation(("ngram",), 3) and limit(3, plain) is None


def limit(draft_max: int | None, speculation: Speculation) -> Speculation | None:
    return GenerationSpec("x", draft_max=draft_max).limit_drafts(speculation)


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A model of random weights that always reasons, unless told not to."""
    folder = tmp_path_factory.mktemp("thinker")
    llama(folder / "thinker.gguf", template=TEMPLATE)
    options = ("--draft", "ngram", "--draft-max", "3", "--threads", "1", "--ctx", "512", "--backend", "llamacpp")
    llama(folder / "always.gguf", template=ALWAYS)
    with serving(folder, "thinker=./thinker.gguf", "always=./always.gguf", *options) as server:
        yield server


def test_reasoning_of_chats(thinker: Server) -> None:
    def ask(**more: Any) -> tuple[int, str, str]:
        """The tokens of reasoning, reasoning, answer."""
        body = thinker.ask("thinker", max_tokens=40, **NO_END, **more).json()
        message, usage = body["choices"][0]["message"], body["usage"]
        assert usage["completion_tokens"] == 40 and "warnings" not in body, body
        return (
            usage["completion_tokens_details"]["reasoning_tokens"],
            message.get("reasoning_content", ""),
            message["content"],
        )

    n_free, free, rest = ask()
    assert (n_free, rest) == (40, "") and free
    for off in ({"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}):
        assert ask(**off)[:2] == (0, "") and ask(**off)[2], off
    for name in ("reasoning_budget_tokens", "thinking_budget_tokens", "thinking_token_budget"):
        n, reasoning, text = ask(**{name: 7})
        assert 7 <= n < 40 and free.startswith(reasoning) and reasoning and text and "</think>" not in text, name
    assert ask(reasoning_budget_tokens=7, draft_max=0)[0] == ask(reasoning_budget_tokens=7)[0]
    assert ask(reasoning_budget_tokens=-1) == ask()
    scored = thinker.ask("thinker", max_tokens=40, logprobs=True, reasoning_budget_tokens=7, **NO_END).json()
    content = scored["choices"][0]["logprobs"]["content"]
    assert len(content) == 40 and "</think>" in "".join(each["token"] for each in content)
    assert all(each["logprob"] <= 0 for each in content)


def test_whether_a_model_reasons_is_shown(thinker: Server, pair: Server) -> None:
    """Also of a template without a switch; the embedded model has none."""
    for server, name, reasons in ((thinker, "thinker", True), (thinker, "always", True), (pair, "embedded", False)):
        assert server.post("/api/generate", json={"model": name}).json()["done_reason"] == "load"
        assert ("thinking" in server.post("/api/show", json={"model": name}).json()["capabilities"]) == reasons, name


def test_a_prompt_without_the_beginning_of_an_answer(thinker: Server) -> None:
    """As in llama.cpp's server; an answer follows the last message then."""

    def counted(**more: Any) -> int:
        body = {"model": "thinker", "messages": USER, **more}
        return int(thinker.post("/v1/chat/completions/input_tokens", json=body).json()["input_tokens"])

    def read(text: str) -> int:
        body = {"model": "thinker", "prompt": text, "max_tokens": 1}
        return int(thinker.post("/v1/completions", json=body).json()["usage"]["prompt_tokens"])

    turn = f"<user>{PROMPT}"
    assert counted() == counted(add_generation_prompt=True) == read(f"{turn}<assistant><think>\n")
    assert counted(add_generation_prompt=False) == read(turn)
    begun = [*USER, {"role": "assistant", "content": "x"}]
    assert counted(messages=begun, add_generation_prompt=False) == read(f"{turn}<assistant>x")
    more = {"continue_final_message": True, "add_generation_prompt": False}
    assert counted(messages=begun, **more) == read(f"{turn}<assistant><think>\n</think>x")
    extra = {"add_generation_prompt": False}
    made = thinker.openai().chat.completions.create(model="thinker", messages=USER, max_tokens=4, extra_body=extra)
    assert made.usage and made.usage.prompt_tokens == read(turn) and made.choices[0].message.content


def test_reasoning_in_other_interfaces(thinker: Server) -> None:
    client, common = thinker.anthropic(), {"model": "thinker", "max_tokens": 40, "messages": USER}

    def kinds(thinking: Any) -> list[str]:
        return [block.type for block in client.messages.create(**common, thinking=thinking, top_k=1).content]  # type: ignore[call-overload]

    assert kinds({"type": "adaptive"}) == ["thinking"]
    assert kinds({"type": "disabled"}) == ["text"]
    assert kinds({"type": "enabled", "budget_tokens": 7}) == ["thinking", "text"]
    with client.messages.stream(**common, thinking={"type": "enabled", "budget_tokens": 7}, top_k=1) as stream:
        assert [block.type for block in stream.get_final_message().content] == ["thinking", "text"]
    responses = thinker.openai().responses
    for effort, kind in (("none", "message"), ("high", "reasoning")):
        made = responses.create(model="thinker", input=PROMPT, max_output_tokens=20, reasoning={"effort": effort})  # type: ignore[typeddict-item]
        assert [item.type for item in made.output] == [kind]
        told = ["the model's chat template has no levels of reasoning effort."] if effort == "high" else None
        assert (made.model_extra or {}).get("warnings") == told
    native = {"model": "thinker", "messages": USER, "stream": False, "options": {"num_predict": 20, "top_k": 1}}
    for think, key in ((False, "content"), (True, "thinking")):
        message = thinker.post("/api/chat", json={**native, "think": think}).json()["message"]
        assert message[key] and not (think and message["content"]) and not (not think and "thinking" in message)


def test_what_becomes_of_a_wish_for_reasoning() -> None:
    off, on, low, few = Thinking(is_on=False), Thinking(is_on=True), Thinking(effort="minimal"), Thinking(budget=5)
    for wish in (off, Thinking(effort="none"), Thinking(budget=0)):
        assert wish.plan(profile_template(TEMPLATE)).variables == {"enable_thinking": False}
        assert wish.plan(profile_template(ALWAYS)).max_reasoning == 0, "a template without a switch"
        assert not wish.plan(NO_TEMPLATE).warnings, "what has no reasoning needs nothing"
    assert (off.plan(profile_template(TEMPLATE)).max_reasoning, few.plan(profile_template(TEMPLATE)).max_reasoning) == (
        None,
        5,
    )
    assert (
        on.plan(profile_template(TEMPLATE)).variables == {"enable_thinking": True}
        and not few.plan(profile_template(TEMPLATE)).variables
    )
    assert (
        low.plan(profile_template(LEVELS)).variables == {"reasoning_effort": "low"}
        and off.plan(profile_template(LEVELS)).max_reasoning == 0
    )
    assert off.plan(profile_template(OFF)).variables == {"reasoning_effort": "none"}
    for wish in (on, low, few):
        assert wish.plan(NO_TEMPLATE).warnings == ("the model's chat template has no reasoning.",)
    assert Thinking(is_on=False, effort="high").plan(profile_template(TEMPLATE)).variables == {"enable_thinking": False}
    assert not Thinking().plan(NO_TEMPLATE).warnings


def test_answers_without_tokens_and_without_limit(small: Server) -> None:
    """0 fills the cache, -1 leaves the end to the context."""
    text = "a prompt that is read once"
    empty = small.ask("tree", text, max_tokens=0).json()
    assert empty["choices"][0]["message"]["content"] == "" and empty["choices"][0]["finish_reason"] == "length"
    timings = empty["timings"]
    assert empty["usage"]["completion_tokens"] == timings["predicted_n"] == timings["predicted_per_second"] == 0
    assert timings["prompt_n"] == len(text) and timings["prompt_ms"] > 0 and None not in timings.values()
    after = small.ask("tree", text, max_tokens=1).json()["timings"]
    assert (after["cache_n"], after["prompt_n"], after["predicted_n"]) == (len(text) - 1, 1, 1)
    end = small.ask("tree", text, max_tokens=-1, logit_bias={"256": -100}).json()
    assert end["usage"]["total_tokens"] == 257 and end["choices"][0]["finish_reason"] == "length"
    message = small.anthropic().messages.create(
        model="tree", max_tokens=0, messages=[{"role": "user", "content": text}]
    )
    assert (message.content, message.stop_reason, message.usage.output_tokens) == ([], "max_tokens", 0)
    native = {"model": "tree", "prompt": text, "raw": True, "stream": False}
    options = {"num_predict": -1, "seed": 1, "temperature": 1}
    assert small.post("/api/generate", json={**native, "options": options}).json()["done_reason"] in ("stop", "length")


def test_a_prompt_that_is_only_scored(pair: Server) -> None:
    completions = pair.openai().completions
    made = completions.create(model="embedded", prompt=PROMPT, max_tokens=0, echo=True, logprobs=1).choices[0]
    assert made.text == PROMPT and made.logprobs and made.logprobs.tokens and made.finish_reason == "length"
    assert "".join(made.logprobs.tokens) == PROMPT
    streamed = list(completions.create(model="embedded", prompt=PROMPT, max_tokens=0, echo=True, stream=True))
    assert "".join(chunk.choices[0].text for chunk in streamed) == PROMPT


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_an_answer_that_repeats_itself_is_ended_where_it_is_asked_for(toy: Server, path: str) -> None:
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if path.startswith("chat") else {"prompt": "hi"}
    only = {**prompt, "model": "tree", "max_tokens": 300, "temperature": 0, "logit_bias": {"97": 100}}
    limits = {"max_pattern_size": 20, "min_pattern_size": 5, "min_count": 4}
    (choice,) = toy.post(f"/v1/{path}", json={**only, "repetition_detection": limits}).json()["choices"]
    assert choice["finish_reason"] == "repetition"
    assert (choice["message"]["content"] if path.startswith("chat") else choice["text"]) == "a" * 20
    (choice,) = toy.post(f"/v1/{path}", json=only).json()["choices"]
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("path", [CHAT, TEXT, RESPONSES, MESSAGES])
def test_fields_of_other_servers_are_told_where_they_change_the_text(path: str, pair: Server) -> None:
    """Those with values that change nothing are not."""
    asked: dict[str, Any] = {"ignore_eos": True, "xtc_probability": 0.5, "stop_token_ids": [3], "dry_multiplier": 0.8}
    neutral: dict[str, Any] = {
        "mirostat": 0,
        "min_tokens": 0,
        "top_n_sigma": -1,
        "samplers": [],
        "tfs_z": 1.0,
        "bad_words": None,
    }
    told = pair.post(path, json=make_body(path, limit=4, model="embedded", **asked, **neutral)).json()["warnings"]
    assert set(told) == {f"{name} is ignored: this server does not have it." for name in asked}
    assert "warnings" not in pair.post(path, json=make_body(path, limit=4, model="embedded", **neutral)).json()


def test_fields_by_their_names_in_llama_cpps_server(pair: Server) -> None:
    body = {"model": "embedded", "messages": USER, "temperature": 0}
    made = pair.post(CHAT, json={**body, "max_tokens": None, "n_predict": 7}).json()
    assert made["usage"]["completion_tokens"] == 7
    for no_limit in ({"n_predict": -1}, {"n_predict": -2}, {"max_tokens": -1}):
        endless = {"model": "embedded", "prompt": "x = 1\n", "temperature": 0, "logit_bias": {"0": -100}, **no_limit}
        usage = pair.post("/v1/completions", json=endless).json()["usage"]
        assert usage["completion_tokens"] > 16, "which is the default of this interface"
    by_either = [pair.post(CHAT, json={**body, "max_tokens": 24, name: 1.9}).json()["choices"][0]["message"]["content"]
                 for name in ("repeat_penalty", "repetition_penalty")]  # fmt: skip
    plain = pair.post(CHAT, json={**body, "max_tokens": 24}).json()["choices"][0]["message"]["content"]
    assert by_either[0] == by_either[1] != plain
    sampled = [pair.post(CHAT, json={**body, "temperature": 1, "seed": 3, "max_tokens": 24, **more}).json()
               for more in ({}, {"typical_p": 0.1})]  # fmt: skip
    assert sampled[0]["choices"] != sampled[1]["choices"]
