// The page: settings, the conversation and the answer in progress. At most one answer is written at a time.

import { Conversation, KEY, addChunk } from "./conversation.mjs";
import { readProps, showTables } from "./server.mjs";
import { streamChat } from "./stream.mjs";
import { TurnView, submitOnEnter } from "./turns.mjs";

const SAVE_MS = 1000;
const KEPT = ["model", "system", "temperature", "max-tokens", "message"]; // fields that a reload keeps
const get = (id) => document.getElementById(id);
const conversation = new Conversation(localStorage);
let views = [];
let running = null; // {abort, view} of the answer in progress
let frame = 0; // in which it is drawn
let props = { models: [], recent: [] };

const readKey = () => sessionStorage.getItem("edgespec.key");

function tell(text, isError = false) {
  get("told").textContent = text;
  get("told").className = isError ? "error" : "";
}

function save() {
  if (!conversation.save()) tell("The browser's storage is full: a reload loses the last answers.", true);
}

function keepFields() {
  if (!get("model").value) return; // the models are not known yet
  const values = Object.fromEntries(KEPT.map((id) => [id, get(id).value]));
  try {
    localStorage.setItem("edgespec.fields", JSON.stringify(values));
  } catch {
    // the storage is full, which save() tells
  }
}

function readFields() {
  try {
    return JSON.parse(localStorage.getItem("edgespec.fields")) ?? {};
  } catch {
    return {};
  }
}

async function refresh() {
  try {
    props = await readProps(readKey());
    get("key-form").hidden = true;
    if (get("told").className === "error") tell("");
    get("version").textContent = props.version;
    showModels(props.models.map((model) => model.name));
    showTables(props, get("models"), get("recent"));
  } catch (error) {
    get("key-form").hidden = error.status !== 401;
    tell(error.message, true);
  }
}

function showModels(names) {
  const select = get("model");
  if (names.join("\n") === [...select.options].map((option) => option.value).join("\n")) return;
  const wanted = select.value || readFields().model;
  select.replaceChildren(...names.map((name) => new Option(name, name)));
  if (names.includes(wanted)) select.value = wanted;
}

/** Whether a model writes plain text, since it has no chat template; null while that is not known. */
function findRaw(name) {
  const model = props.models.find((each) => each.name === name);
  return model?.is_open ? !model.has_chat_template : null;
}

function showTurns() {
  views = conversation.turns.map(makeView);
  get("turns").replaceChildren(...views.map((view) => view.element));
  views.forEach((view, i) => view.finish(i === views.length - 1));
  get("turns").scrollTop = get("turns").scrollHeight;
}

function makeView(turn) {
  return new TurnView(turn, { copy: copyText, retry: () => askAgain(turn.question), edit: askAgain });
}

async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    tell("Copied.");
  } catch {
    tell("The browser allows no copying here: select the text and press Ctrl+C.", true);
  }
}

function askAgain(question) {
  if (running) return;
  conversation.turns.pop();
  views.pop().element.remove();
  ask(question);
}

function ask(question) {
  views.at(-1)?.finish(false);
  const turn = conversation.ask(question, get("model").value);
  turn.answer.isRaw = findRaw(turn.answer.model) ?? false;
  const view = makeView(turn);
  views.push(view);
  get("turns").append(view.element);
  view.begin();
  get("turns").scrollTop = get("turns").scrollHeight;
  save();
  write(turn, view);
}

function makeBody(model) {
  const [temperature, limit] = [get("temperature").value, get("max-tokens").value];
  return {
    ...(model && { model }),
    messages: conversation.messages(get("system").value.trim()),
    ...(temperature !== "" && { temperature: Number(temperature) }),
    ...(limit !== "" && { max_tokens: Number(limit) }),
  };
}

/** Write the answer of the last turn. */
async function write(turn, view) {
  const abort = new AbortController();
  running = { abort, view };
  showState();
  let saved = performance.now();
  try {
    const { answer } = turn;
    for await (const chunk of streamChat("v1/chat/completions", makeBody(answer.model), readKey(), abort.signal)) {
      if (!answer.text && !answer.reasoning && findRaw(answer.model) === null) await learn(answer, view);
      if (abort.signal.aborted) return;
      addChunk(answer, chunk);
      draw();
      if (performance.now() - saved > SAVE_MS) {
        save();
        saved = performance.now();
      }
    }
  } catch (error) {
    if (abort.signal.aborted) return;
    turn.answer.error = error.message;
    if (error.status === 401) get("key-form").hidden = false;
  }
  if (!abort.signal.aborted) end();
}

/** The model has been loaded: show its answer as what it is. */
async function learn(answer, view) {
  await refresh();
  answer.isRaw = findRaw(answer.model) ?? false;
  view.build();
}

/** Show the answer in progress at the next frame. */
function draw() {
  frame ||= requestAnimationFrame(() => {
    frame = 0;
    if (running) follow(() => running.view.update());
  });
}

/** Change the conversation. It stays at its end unless the reader has scrolled up. */
function follow(change) {
  const turns = get("turns");
  const isAtEnd = turns.scrollHeight - turns.scrollTop - turns.clientHeight < 40;
  change();
  if (isAtEnd) turns.scrollTop = turns.scrollHeight;
}

function stop() {
  if (!running) return;
  running.abort.abort();
  running.view.turn.answer.ending = "stopped";
  end();
}

function end() {
  const { view } = running;
  running = null;
  follow(() => view.finish(true));
  showState();
  const { error, ending } = view.turn.answer;
  tell(error ? "" : ending === "stopped" ? "Stopped." : "The answer is complete.");
  save();
  refresh();
}

function showState() {
  get("send").disabled = running !== null;
  get("clear").disabled = running !== null;
  get("stop").disabled = running === null;
  if (running) tell("Answering.");
}

get("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const question = get("message").value;
  if (running || !question.trim()) return;
  if (!get("settings").querySelector(":invalid")) {
    get("message").value = "";
    keepFields();
    ask(question);
    return;
  }
  get("settings").open = true;
  get("settings").querySelector(":invalid").reportValidity();
});
get("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("edgespec.key", get("key").value);
  get("key").value = "";
  refresh();
});
get("clear").addEventListener("click", () => {
  if (!conversation.turns.length || !confirm("Delete this conversation?")) return;
  conversation.clear();
  showTurns();
  get("message").focus();
});
get("stop").addEventListener("click", () => {
  stop();
  get("message").focus();
});
get("message").addEventListener("keydown", submitOnEnter);
document.addEventListener("keydown", (event) => { if (event.key === "Escape") stop(); });
document.addEventListener("input", keepFields);
addEventListener("pagehide", () => conversation.save());
addEventListener("storage", (event) => { // another tab has written
  if (event.key !== KEY || running) return;
  conversation.load();
  showTurns();
});
for (const [id, value] of Object.entries(readFields())) if (KEPT.includes(id)) get(id).value = value;
showTurns();
refresh();
setInterval(() => { if (!document.hidden && get("server").open) refresh(); }, 1000);
