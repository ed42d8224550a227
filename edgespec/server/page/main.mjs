// The page: settings, the open conversation and the answer in progress. At most one answer is written at a time.

import { addChunk } from "./conversation.mjs";
import { ConversationList } from "./conversations.mjs";
import { make } from "./dom.mjs";
import { keepFields, readFields, restoreFields } from "./fields.mjs";
import { Library, toFile } from "./library.mjs";
import { readProps, showTables } from "./server.mjs";
import { streamChat } from "./stream.mjs";
import { TurnView, submitOnEnter } from "./turns.mjs";

const SAVE_MS = 1000;
const get = (id) => document.getElementById(id);
const library = new Library(localStorage);
const list = new ConversationList(get("conversations"), library, { open, rename, remove, save: saveFile });
let conversation = library.open(sessionStorage.getItem("edgespec.open") ?? library.list()[0]?.id);
let views = [];
let running = null; // {abort, view, conversation} of the answer in progress
let frame = 0; // in which it is drawn
let props = { models: [], recent: [] };

const readKey = () => sessionStorage.getItem("edgespec.key");

function tell(text, isError = false) {
  get("told").textContent = text;
  get("told").className = isError ? "error" : "";
}

function save(written = conversation) {
  if (!written.save()) tell("The browser's storage is full: a reload loses the last answers.", true);
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

/** Open a conversation, or begin one. */
function open(id) {
  conversation = running && running.conversation.id === id ? running.conversation : library.open(id);
  showTurns();
  scrollToEnd();
  get("message").focus();
}

function rename(id, name) {
  const title = prompt("Name of the conversation", name);
  if (title === null) return;
  (id === conversation.id ? conversation : library.open(id)).rename(title);
  showName();
}

function remove(id, name) {
  if (!confirm(`Delete "${name}"?`)) return;
  if (running?.conversation.id === id) stop();
  library.remove(id);
  if (conversation.id === id) open();
}

function saveFile(id, name) {
  const blob = new Blob([toFile(library.open(id), get("system").value.trim())], { type: "application/json" });
  const download = `${name.replace(/[^\p{L}\p{N} -]/gu, "").trim() || "conversation"}.json`;
  const link = make("a", { href: URL.createObjectURL(blob), download });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href));
}

function showName() {
  get("name").textContent = conversation.turns.length ? conversation.name : "";
  document.title = conversation.turns.length ? `${conversation.name} - edgespec` : "edgespec";
}

/** Show the turns. Those that have not changed keep their elements, and so what is selected or edited there. */
function showTurns() {
  sessionStorage.setItem("edgespec.open", conversation.id);
  showName();
  const former = new Map(views.map((view) => [view.turn.id, view]));
  const last = conversation.turns.at(-1);
  views = conversation.turns.map((turn) => {
    const view = former.get(turn.id);
    if (turn === running?.view.turn) return running.view;
    const isSame = view && view.wasLast === (turn === last) && JSON.stringify(view.turn) === JSON.stringify(turn);
    if (isSame) return Object.assign(view, { turn });
    const made = makeView(turn);
    made.finish(turn === last);
    return made;
  });
  const elements = views.map((view) => view.element);
  for (const element of [...get("turns").children]) if (!elements.includes(element)) element.remove();
  elements.forEach((element, i) => {
    if (get("turns").children[i] !== element) get("turns").insertBefore(element, get("turns").children[i] ?? null);
  });
}

function scrollToEnd() {
  get("turns").scrollTop = get("turns").scrollHeight;
}

function makeView(turn) {
  const again = (question) => askAgain(turn, question);
  return new TurnView(turn, { copy: copyText, retry: () => again(turn.question), edit: again });
}

async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    tell("Copied.");
  } catch {
    tell("The browser allows no copying here: select the text and press Ctrl+C.", true);
  }
}

function askAgain(turn, question) {
  if (running) return;
  conversation.remove(turn);
  showTurns();
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
  scrollToEnd();
  save();
  showName();
  write(turn, view);
}

function makeBody(turn) {
  const [temperature, limit] = [get("temperature").value, get("max-tokens").value];
  return {
    ...(turn.answer.model && { model: turn.answer.model }),
    messages: conversation.messages(turn, get("system").value.trim()),
    ...(temperature !== "" && { temperature: Number(temperature) }),
    ...(limit !== "" && { max_tokens: Number(limit) }),
  };
}

/** Write the answer of the last turn. */
async function write(turn, view) {
  const abort = new AbortController();
  running = { abort, view, conversation };
  const asked = conversation;
  showState();
  const body = makeBody(turn);
  let saved = performance.now();
  try {
    const { answer } = turn;
    for await (const chunk of streamChat("v1/chat/completions", body, readKey(), abort.signal)) {
      if (!answer.text && !answer.reasoning && findRaw(answer.model) === null) await learn(answer, view);
      if (abort.signal.aborted) return;
      addChunk(answer, chunk);
      draw();
      if (performance.now() - saved > SAVE_MS) {
        save(asked);
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
  if (isAtEnd) scrollToEnd();
}

function stop() {
  if (!running) return;
  running.abort.abort();
  running.view.turn.answer.ending = "stopped";
  end();
}

function end() {
  const { view, conversation: written } = running;
  running = null;
  save(written);
  if (written === conversation) {
    view.finish(true);
    follow(showTurns);
  }
  showState();
  const { error, ending } = view.turn.answer;
  tell(error ? "" : ending === "stopped" ? "Stopped." : "The answer is complete.");
  refresh();
}

function showState() {
  get("send").disabled = running !== null;
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
get("new").addEventListener("click", () => open());
get("show-conversations").addEventListener("click", () => list.show());
get("show-server").addEventListener("click", () => get("server").showModal());
for (const dialog of document.querySelectorAll("dialog")) {
  dialog.querySelector(".close").addEventListener("click", () => dialog.close());
  dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); }); // outside of it
}
get("stop").addEventListener("click", () => {
  stop();
  get("message").focus();
});
get("message").addEventListener("keydown", submitOnEnter);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) stop();
});
document.addEventListener("input", keepFields);
addEventListener("pagehide", () => running?.conversation.save());
addEventListener("storage", (event) => { // another tab has written
  if (get("conversations").open) list.update();
  if (event.key !== conversation.key || running?.conversation === conversation) return; // its end takes them over
  if (event.newValue === null) open();
  else {
    conversation.load();
    follow(showTurns);
  }
});
restoreFields();
showTurns();
scrollToEnd();
refresh();
setInterval(() => { if (!document.hidden && get("server").open) refresh(); }, 1000);
