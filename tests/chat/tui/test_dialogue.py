"""Questions and answers in a row: what waits, what is gone on with, what does not fit, and the branches."""

from __future__ import annotations

from pathlib import Path
from threading import Event

from edgespec.backends.options import LoadOptions
from edgespec.chat import Store
from edgespec.chat.tui.race import Race
from edgespec.chat.tui.window import Queued
from edgespec.client.local import LocalEngine
from edgespec.models.load_config import LoadConfig
from tests.chat.tui.driving import ENDLESS, Driver, chat_of, driving, in_app, in_loop, numbers
from tests.chat.tui.screens import seen

SMALL = LoadConfig(model="tree", backend="toy", draft_max=3, load=LoadOptions(context_size=100))


async def arrows(chat: Driver) -> list[str]:
    """The lines of the screen with arrows."""
    lines = (await seen(chat.app, chat.pilot)).splitlines()
    return [" ".join(line.removeprefix("│").split("│")[0].split()) for line in lines if "‹" in line]  # noqa: RUF001


@in_app
async def test_what_is_sent_meanwhile_waits_in_order_and_can_be_taken_back(chat: Driver) -> None:
    app, waiting = chat.app, chat.app.query_one(Queued)
    await chat.begin("one")
    for text in ("two", "three", "four\nfive", "six"):
        await chat.send(text)
    assert app.queued == ["two", "three", "four\nfive", "six"] and waiting.display
    assert "queued: four five" in await seen(app, chat.pilot) and chat.texts[0] == "one"
    await chat.press("up")
    assert chat.prompt.text == "six" and app.queued == ["two", "three", "four\nfive"]
    chat.prompt.put("")
    app.chat.max_tokens = 5
    await chat.press("escape")  # stops the answer alone
    await chat.until(lambda: len(chat.turns) == 8 and app.activity.job is None)
    assert [turn.text for turn in chat.app.recorder.questions] == ["one", "two", "three", "four\nfive"]
    assert not waiting.display and chat.shown == chat.texts
    await chat.send("/model nonsense")
    await chat.send("seven")  # the model that was open answers
    await chat.until(lambda: any("no toy model 'nonsense'" in each for each in chat.notices("error")))
    await chat.until(lambda: len(chat.turns) == 10 and app.activity.job is None)


@in_app
async def test_commands_that_are_sent_during_an_answer_run_after_it(chat: Driver) -> None:
    app = chat.app
    await chat.begin("one")
    app.chat.max_tokens = 5
    lines = ["/retry", "/continue", "/branch", "/incognito", "/incognito", "two", "/draft ngram", "/edit 1",
             "/import none.json", "/model linear", "three"]  # fmt: skip
    for line in lines:
        await chat.send(line)
    assert app.queued == lines and chat.texts[0] == "one" and not chat.notices("error")
    chat.prompt.put("typed meanwhile")
    await chat.press("escape")
    await chat.until(lambda: chat.texts[:1] == ["three"] and len(chat.turns) == 2 and app.activity.job is None)
    assert not app.queued and chat.turns[1].settings["model"] == "linear"
    assert chat.prompt.text == "two\n\ntyped meanwhile"
    assert "Cannot read none.json" in " ".join(chat.notices("error"))
    assert [each.title for each in app.recorder.saved.recent()] == ["two", "one"]


@in_app
async def test_what_is_sent_while_a_model_is_loading_waits_for_it(chat: Driver) -> None:
    app = chat.app
    app.chat.max_tokens = 5
    is_sent = Event()
    assert isinstance(app.client, LocalEngine)
    app.client.submit(lambda: iter([is_sent.wait(30)]))  # the load begins after it
    await app.open_model(app.request)
    await app.ask("early")
    for line in ("/set top-k 7", "/draft ngram", "/retry 1", "//x"):
        await chat.send(line)
    assert app.queued == ["early", "/draft ngram", "/retry 1", "//x"]
    assert not chat.turns and app.chat.sampling.top_k == 7  # what needs no engine is done at once
    is_sent.set()
    await chat.until(lambda: len(chat.turns) == 4 and app.activity.job is None and not app.queued)
    assert chat.texts[::2] == ["early", "/x"] and chat.turns[1].id == 3  # answered again
    assert [turn.settings.get("draft") for turn in chat.turns[1::2]] == ["ngram", "ngram"]
    await chat.send("/undo")
    await chat.until(lambda: len(chat.turns) == 2)
    await app.open_model(app.request)
    await app.run_command("race hello")
    await app.ask("after the race")
    await chat.until(lambda: isinstance(app.screen, Race))
    assert app.queued == ["after the race"]
    await chat.press("escape")
    await chat.until(lambda: len(chat.turns) == 4 and app.activity.job is None)
    assert chat.texts[::2] == ["early", "after the race"]


@in_loop
async def test_an_answer_that_the_end_of_the_program_cut_off_grows_on() -> None:
    async with driving(chat=chat_of(20)) as chat:
        await chat.ask("one")
    store = Store.open()
    store.reopen(store.path(2)[-1])  # as the store is when the process is killed
    async with driving(chat=chat_of(30), resume=1, store=store) as chat:
        cut = chat.texts[-1]
        assert chat.footers == ["cut off when the program ended"] and len(cut) == 20
        await chat.send("/continue")
        await chat.until(lambda: len(chat.texts[-1]) == 50 and chat.turns[-1].finished)
        await chat.idle()
        assert chat.texts[-1].startswith(cut) and chat.shown == chat.texts


@in_loop
async def test_a_full_context_is_told_of_before_and_can_roll() -> None:
    async with driving(SMALL, chat=chat_of(30)) as chat:
        await chat.ask("a" * 20)
        await chat.ask("b" * 20)
        assert any("The context is" in each and "/set rolling on" in each for each in chat.notices())
        assert not any("/continue" in each for each in chat.footers) and numbers(chat).endswith(" · 100/100 · ")
        shown = chat.shown
        await chat.hears("c" * 20, "the prompt has 120 tokens", "/set rolling on", "/new", "--ctx", kind="error")
        assert chat.prompt.text == "c" * 20 and chat.shown == shown and len(chat.turns) == 4
        await chat.hears("/set rolling on", "rolling on")
        await chat.ask("c" * 20)
        assert any("question 1 and its answer are left out from here on." in each for each in chat.notices())
        assert len(chat.turns) == 6 and chat.app.chat.left_out == 2 and chat.shown[:4] == shown
        await chat.send("/retry 1")
        await chat.until(lambda: len(chat.turns) == 2 and chat.turns[-1].finished)
        await chat.idle()
        assert chat.app.chat.left_out == 0
        await chat.hears("d" * 99, "the prompt has", "Shorten the message", kind="error")


@in_app
async def test_arrows_at_each_message_lead_to_every_branch(chat: Driver) -> None:
    chat.app.chat.max_tokens = 10
    await chat.ask("one")
    await chat.ask("two")
    assert await arrows(chat) == []
    await chat.send("/edit 1")
    await chat.until(lambda: chat.prompt.text == "one")
    await chat.ask("uno")
    await chat.send("/retry")
    await chat.until(lambda: chat.turns[-1].id == 7 and chat.turns[-1].finished)
    await chat.idle()
    question, answer = await arrows(chat)
    assert question == "▌ ‹ 2/2 ›" and answer.startswith("‹ 2/2 › 10 tokens")  # noqa: RUF001
    await chat.press("alt+left")
    await chat.until(lambda: chat.turns[-1].id == 6)
    await chat.press("alt+up", "alt+left")
    await chat.until(lambda: chat.texts[0] == "one" and len(chat.turns) == 4)
    assert [line[:9] for line in await arrows(chat)] == ["▌ ‹ 1/2 ›"] and chat.shown == chat.texts  # noqa: RUF001
    await chat.press("alt+right")
    await chat.until(lambda: chat.texts[0] == "uno" and chat.turns[-1].id == 7)
    await chat.press("alt+down", "ctrl+b")
    await chat.until(lambda: chat.turns[-1].id == 6)
    lines = (await seen(chat.app, chat.pilot)).splitlines()
    for line, at in ((2, 4), (2, 0)):  # a click on each arrow of the answer
        row = [i for i, text in enumerate(lines) if "‹" in text][line - 1]  # noqa: RUF001
        before = chat.turns[-1].id
        await chat.pilot.click("#transcript", offset=(lines[row].index("‹") + at + 1 * (at > 0), row))  # noqa: RUF001
        await chat.until(lambda before=before: chat.turns[-1].id != before)


@in_app
async def test_an_answer_that_never_began_gives_way_to_the_one_before(chat: Driver) -> None:
    chat.app.chat.max_tokens = 10
    text = await chat.ask("one")
    bias = chat.app.chat.sampling.__class__(temperature=0.0, logit_bias=((256, 1000.0),))
    chat.app.chat.sampling = bias  # it ends at once
    await chat.send("/retry")
    await chat.until(lambda: chat.app.recorder.store.turns(chat.app.recorder.conversation)[-1].id == 3)
    await chat.idle()
    assert chat.texts == chat.shown == ["one", text] and await arrows(chat) == []


@in_loop
async def test_a_conversation_keeps_the_name_of_its_model_until_another_answers(data: Path) -> None:
    async with driving() as chat:
        chat.app.chat.max_tokens = 5
        await chat.ask("one")
        opened = chat.turns[-1].settings["opened"]
        assert opened == {"reference": "tree", "draft": "auto", "backend": "toy"}
    linear = LoadConfig(model="linear", backend="toy", draft_max=3, load=LoadOptions(context_size=2 * ENDLESS))
    async with driving(linear) as chat:
        store = chat.app.recorder.store
        await chat.app.resume(1)
        await chat.until(lambda: any("held with tree; /model tree opens it." in each for each in chat.notices()))
        assert store.resume(1).model == "tree"
        chat.app.chat.max_tokens = 5
        await chat.ask("two")
        assert store.resume(1).model == "linear"
    missing = LoadConfig(model="nonsense", backend="toy")
    async with driving(missing, resume=1) as chat:
        assert len(chat.turns) == 4 and chat.app.recorder.store.resume(1).model == "linear"
        said = "The model of this conversation, linear, is not open; Ctrl+G lists models."
        await chat.until(lambda: said in chat.notices())
        await chat.hears("/model tree", "tree on toy")
        await chat.idle()
        assert chat.notices().count(said) == 1
