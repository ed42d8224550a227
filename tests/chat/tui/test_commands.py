"""Commands on what answers, and those that show something."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table
from textual.widgets import Static

from edgespec.chat.tui.commands import COMMANDS
from edgespec.chat.tui.details import Details
from edgespec.chat.tui.keys import Help
from edgespec.chat.tui.picker import Picker
from edgespec.chat.tui.progress import Downloads
from edgespec.chat.tui.race import Race
from edgespec.chat.tui.transcript import Notice
from edgespec.models.load_config import LoadConfig
from edgespec.text.chat_template import Message
from tests.chat.tui.driving import EMBEDDED, ENDLESS, Driver, chat_of, driving, in_app, in_loop, numbers


def test_every_command_is_tried() -> None:
    tests = "".join(Path(__file__).with_name(f"test_{name}commands.py").read_text() for name in ("", "chat_", "file_"))
    assert [command.name for command in COMMANDS if f"/{command.name}" not in tests] == []


async def shows(chat: Driver, line: str, screen: type) -> None:
    await chat.send(line)
    await chat.until(lambda: isinstance(chat.app.screen, screen))
    await chat.press("escape")
    await chat.until(lambda: len(chat.app.screen_stack) == 1)


@in_app
async def test_small_commands(chat: Driver) -> None:
    await chat.send("/help")
    await chat.until(lambda: isinstance(chat.app.screen, Help))
    table = chat.app.screen.query(Static).last().content
    assert isinstance(table, Table)
    rows = zip(*(map(str, column.cells) for column in table.columns), strict=True)
    assert list(rows) == [(f"/{each.name} {each.arguments}".rstrip(), each.summary) for each in COMMANDS]
    await chat.press("escape")
    await shows(chat, "/?", Help)
    await chat.errs("/nonsense 1", "no command /nonsense", "F1")
    await chat.errs("/", "no command")
    for command in COMMANDS:
        if command.arguments and not command.arguments.startswith("["):
            await chat.errs(f"/{command.name}", f"/{command.name} needs {command.arguments}")
    await shows(chat, "/stats", Details)
    await chat.hears("/system Be brief.", "system message: Be brief.")
    await chat.ask("hello")
    recorder, (system, *_) = chat.app.recorder, chat.app.chat.request().prompt
    assert system == Message("system", "Be brief.")
    assert recorder.store.recent()[0].system == "Be brief."
    await chat.hears("/system Be long.", "Be long.")
    assert recorder.store.recent()[0].system == "Be long."
    await chat.hears("/system", "system message: Be long.")
    await chat.hears("/system none", "system message: none")
    await chat.hears("/system", "system message: none")
    assert recorder.store.recent()[0].system is None and len(chat.app.chat.request().prompt) == 2
    await chat.send("/exit")
    await chat.until(lambda: not chat.app.is_running)


@in_app
async def test_spec(chat: Driver) -> None:
    chat.app.chat.max_tokens = 150
    text = await chat.ask("hello")
    assert chat.turns[-1].metrics["drafted_tokens"] > 0
    await chat.hears("/spec off", "speculation: off")
    await chat.send("/retry")
    await chat.until(lambda: chat.turns[-1].id > 2 and chat.turns[-1].finished)
    assert chat.texts == ["hello", text] and chat.turns[-1].metrics["drafted_tokens"] == 0
    await chat.hears("/spec on", "3 tokens at a time, by ngram+model")
    await chat.hears("/spec 2", "2 tokens at a time, by ngram+model")
    await chat.hears("/spec auto", "as much as pays, by ngram+model")
    await chat.hears("/spec 0", "speculation: off")
    await chat.hears("/spec on", "as much as pays")
    await chat.hears("/spec", "as much as pays")
    for wrong in ("maybe", "-1", "64", "9999", "²"):
        await chat.errs(f"/spec {wrong}", "on, off, auto or a number from 0 to 63")
    await chat.hears("/spec", "as much as pays")


@in_app
async def test_spec_off_and_on_during_an_answer_leaves_the_text_as_it_is(chat: Driver) -> None:
    rounds = lambda: chat.app.activity.meter.steps[1:]  # noqa: E731
    chat.app.chat.max_tokens = 150
    text = await chat.ask("hello")
    chat.app.chat.max_tokens = ENDLESS
    await chat.send("/retry")
    await chat.until(lambda: rounds() and rounds()[-1].n_drafted)
    await chat.hears("/spec off", "speculation: off")
    await chat.until(lambda: rounds()[-1].n_drafted == 0)
    off = rounds()[-1].index
    await chat.until(lambda: rounds()[-1].index > off + 5)
    assert {step.n_drafted for step in rounds() if step.index >= off} == {0}
    await chat.hears("/spec on", "3 tokens at a time")
    await chat.until(lambda: rounds()[-1].n_drafted == 3)
    await chat.growing(len(text))
    await chat.press("escape")
    await chat.idle()
    assert chat.texts[-1].startswith(text)


@in_app
async def test_draft(chat: Driver) -> None:
    text = await chat.ask("hello")
    await chat.hears(
        "/draft",
        "draft: ngram+model (choose from auto, none, ngram, suffix, recycling, lookahead[:W,N,G], model[:REF], ",
    )
    await chat.hears(
        "/draft nonsense",
        "no toy model 'nonsense'",
        "Drafters: ngram, suffix, recycling, lookahead, model, ",
        kind="error",
    )
    await chat.idle()
    await chat.hears("/draft ngrm", "no toy model 'ngrm'", "Did you mean ngram?", kind="error")
    await chat.idle()
    await chat.hears("/draft ngram+ngram", "names 'ngram' twice", kind="error")
    await chat.idle()
    await chat.hears("/draft", "draft: ngram+model")
    await chat.hears("/spec 2", "2 tokens")
    await chat.hears("/draft none", "tree on toy, no drafts")
    await chat.idle()
    await chat.errs("/spec on", "nothing to draft with")
    await chat.errs("/race", "no draft to race")
    await chat.hears("/spec", "speculation: off")
    await chat.hears("/draft ngram", "tree on toy, drafts by lookups")
    await chat.idle()
    await chat.send("/retry")
    await chat.until(lambda: chat.turns[-1].id > 2 and chat.app.activity.job is None)
    assert chat.texts == ["hello", text] and chat.turns[-1].settings["draft"] == "ngram"
    await chat.hears("/spec", "2 tokens at a time, by ngram")
    await chat.hears("/spec off", "speculation: off")
    await chat.hears("/draft model", "tree on toy, drafts by model (off)")
    await chat.idle()
    await chat.hears("/spec on", "2 tokens at a time, by model")
    await chat.begin("and on", 1)
    await chat.waits_amid("/draft none")


@in_app
async def test_model(chat: Driver) -> None:
    await chat.ask("hello")
    await shows(chat, "/model", Picker)
    await chat.hears("/model nonsense", "no toy model 'nonsense'", kind="error")
    await chat.idle()
    await chat.ask("still there")
    assert chat.turns[-1].settings["model"] == "tree"
    await chat.send("/undo")
    await chat.hears("/spec off", "speculation: off")
    await chat.hears("/model linear", "linear on toy, drafts by lookups + model (off)")
    await chat.idle()
    await chat.hears("/spec on", "3 tokens at a time")
    await chat.ask("and on")
    assert [turn.role for turn in chat.turns] == ["user", "assistant"] * 2
    assert chat.turns[-1].settings["model"] == "linear"
    await chat.begin("more", 1)
    await chat.waits_amid("/model tree")
    assert "tok/s" in numbers(chat)
    await chat.hears("/model tree", "tree on toy")
    await chat.idle()
    assert not numbers(chat)  # they were those of the model before


@in_loop
async def test_a_first_model_that_cannot_be_opened_leaves_the_app_to_choose_another() -> None:
    async with driving(LoadConfig(model="nonsense", backend="toy", draft_max=3)) as chat:
        await chat.until(lambda: chat.notices("error"))
        await chat.idle()
        assert "no toy model 'nonsense'" in chat.notices("error")[0] and len(chat.app.screen_stack) == 1
        for line in ("/spec", "/draft", "/draft ngram", "/race", "/retry"):
            message = await chat.hears(line, "no model is open", kind="error")
            assert "/model chooses one" in message
        await chat.hears("and on", "no model is open", "/model", kind="error")
        assert chat.prompt.text == "and on"
        chat.prompt.put("")
        kept = lambda: [item for item in chat.transcript.items if isinstance(item, Notice)]  # noqa: E731
        assert [each.kind for each in kept()] == ["error"]
        await chat.hears("/model tree", "tree on toy")
        await chat.idle()
        assert not kept()  # what it told of is over
        await chat.hears("/model tree", "tree on toy")
        await chat.idle()
        await chat.ask("hello")


@in_app
async def test_set(chat: Driver) -> None:
    state = chat.app.chat
    await chat.hears("/set temperature 0.5", "temperature 0.5")
    await chat.hears("/set top-k 7", "top_k 7")
    await chat.hears("/set seed 5", "seed 5")
    await chat.hears("/set max_tokens 9", "max_tokens 9")
    await chat.hears("/set system  Be brief. ", "system Be brief.")
    assert (state.sampling.temperature, state.sampling.top_k, state.seed, state.max_tokens, state.system) == (
        0.5, 7, 5, 9, "Be brief."
    )  # fmt: skip
    await chat.hears(
        "/set", "temperature 0.5, top_k 7, top_p 1.0", "max_tokens 9, seed 5, rolling off, system Be brief."
    )
    before = (state.sampling, state.seed, state.max_tokens)
    for wrong, said in (("temperature warm", "must be a number"), ("temperature none of it", "must be a number"),
                        ("colour", "no setting 'colour'"), ("rolling maybe", "on or off"),
                        ("top_p 2", "be"),
                        ("temperature nan", "be"), ("temperature 1000", "be"), ("colour 1", "no setting 'colour'"),
                        ("seed 0.5", "a whole number"), ("max_tokens 0", "at least 1"),
                        ("penalty_window -5", "between 0 and 2,147,483,647")):  # fmt: skip
        await chat.errs(f"/set {wrong}", said)
    assert (state.sampling, state.seed, state.max_tokens) == before
    await chat.ask("hello")
    assert 1 <= chat.turns[-1].metrics["emitted_tokens"] <= 9 and chat.turns[-1].metrics["seed"] == 5
    await chat.hears("/set system Be long.", "Be long.")
    assert chat.app.recorder.store.recent()[0].system == "Be long."
    await chat.hears("/set system", "system Be long.")
    await chat.hears("/set system none", "system none")
    assert state.system is None
    await chat.hears("/set seed none", "seed none")
    await chat.hears("/set max_tokens none", "max_tokens none")
    await chat.hears("/set temperature none", "temperature 0.0")
    await chat.hears("/set rolling on", "rolling on")
    await chat.hears("/set rolling none", "rolling off")
    await chat.hears("/set rolling on", "rolling on")
    assert (state.seed, state.max_tokens, state.rolling) == (None, None, True)


async def run_race(chat: Driver) -> str:
    """The result of the race that is on, which is then left."""
    await chat.until(lambda: isinstance(chat.app.screen, Race) and chat.app.screen.query("#race-result"))
    result = chat.app.screen.query_one("#race-result", Static)
    await chat.until(lambda: "Running" not in str(result.render()))
    message = str(result.render())
    await chat.press("escape")
    await chat.until(lambda: len(chat.app.screen_stack) == 1)
    return message


@in_app
async def test_race(chat: Driver) -> None:
    await chat.errs("/race", "no question to race")
    await chat.send("/race hello")
    assert "over 40 tokens: " in await run_race(chat)
    assert not chat.turns
    text = await chat.ask("hello")
    await chat.hears("/spec off", "off")
    await chat.send("/race")
    assert "the same text" in await run_race(chat)
    assert chat.texts == ["hello", text]
    await chat.hears("/spec", "off")  # as it was before the race
    chat.app.chat.max_tokens = ENDLESS
    await chat.send("/race")
    await chat.until(lambda: isinstance(chat.app.screen, Race))
    chat.app.query_one(Downloads).post_message(Downloads.Done(LoadConfig(model="linear", backend="toy")))
    await chat.until(lambda: any("Linear is downloaded; Ctrl+G opens it" in each for each in chat.notices()))
    assert chat.app.activity.job is None, "the race goes on with the model that it began with"
    await chat.press("escape")
    chat.app.chat.max_tokens = 5
    await chat.ask("and on")  # nothing is in its way
    await chat.begin("more", 1)
    await chat.waits_amid("/race")


@in_loop
async def test_hints_name_the_keys_of_the_chat() -> None:
    async with driving(EMBEDDED) as chat:
        said = await chat.hears("/draft foo", "no model called 'foo'", "Ctrl+G shows the models.", kind="error")
        assert "edgespec list" not in said
        await chat.idle()


@in_loop
async def test_a_race_of_real_models() -> None:
    async with driving(EMBEDDED, chat=chat_of(12)) as chat:
        await chat.send("/race import os\nimport")
        assert "over 12 tokens: " in await run_race(chat)
        assert (await chat.ask("import os\nimport")).strip()


@in_app
async def test_preset(chat: Driver) -> None:
    await chat.hears("/preset", "presets: none", "/preset save NAME")
    await chat.errs("/preset coder", "there is no preset 'coder'", "/preset save")
    await chat.errs("/preset save ../x", "no name of a preset")
    await chat.hears("/system Write Python.", "Write Python.")
    await chat.hears("/set top-k 7", "7")
    await chat.hears("/preset save coder", "saved the preset coder", "edgespec chat --preset coder")
    await chat.hears("/set top-k none", "0")
    await chat.hears("/set seed 5", "5")
    await chat.hears("/preset coder", "top_k 7", "system Write Python.")
    assert chat.app.chat.sampling.top_k == 7 and chat.app.chat.seed == 1, "as it was saved"
    await chat.hears("/preset", "presets: coder")
    await chat.hears("/preset remove coder", "removed")
    await chat.errs("/preset remove coder", "there is no preset")
