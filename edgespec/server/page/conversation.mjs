// A conversation: its turns, what is sent of them, and its place in the browser's storage.

/** Before the id of a conversation in the keys of the storage. */
export const PREFIX = "edgespec.conversation.";

/**
 * One conversation, which several tabs may have open. Each tab writes the turns that it asked, so none overwrites the
 * answer of another.
 *
 * A turn is {id, at, question, answer}, `at` in milliseconds since 1970; an answer {model, text, reasoning, calls,
 * figures, ending, error}.
 */
export class Conversation {
  constructor(storage, id = makeId()) {
    Object.assign(this, { storage, id, key: PREFIX + id, title: "", turns: [] });
    this.own = new Set(); // ids of the turns that this tab asked
    this.removed = new Set(); // ids of turns that were asked again
    this.load();
  }

  get name() {
    return nameOf(this);
  }

  /** Take over what other tabs have stored. Where one has deleted the conversation, this tab's copy stays. */
  load() {
    const stored = readRecord(this.storage.getItem(this.key));
    if (!stored) return;
    this.title = stored.title;
    for (const id of stored.removed) this.removed.add(id);
    const turns = new Map(stored.turns.map((turn) => [turn.id, turn]));
    for (const turn of this.turns) if (this.own.has(turn.id)) turns.set(turn.id, turn);
    this.turns = [...turns.values()].filter(({ id }) => !this.removed.has(id)).sort((one, two) => one.at - two.at);
  }

  /** Keep the turns in the storage. Returns whether they fit. */
  save() {
    this.load();
    return this.write();
  }

  rename(title) {
    this.load();
    this.title = title.trim();
    return this.write();
  }

  write() {
    const { title, turns, removed } = this;
    if (!turns.length && !removed.size && !title) return true; // nothing was said yet
    try {
      this.storage.setItem(this.key, JSON.stringify({ title, turns, removed: [...removed], changed: Date.now() }));
      return true;
    } catch {
      return false;
    }
  }

  /** Begin a turn. */
  ask(question, model) {
    const at = Math.max(Date.now(), (this.turns.at(-1)?.at ?? 0) + 1);
    const turn = { id: makeId(), at, question, answer: readAnswer({ model }) };
    this.turns.push(turn);
    this.own.add(turn.id);
    return turn;
  }

  /** Take a turn back. */
  remove(turn) {
    this.removed.add(turn.id);
    this.turns = this.turns.filter(({ id }) => id !== turn.id);
  }

  /** The messages of a request for the answer of `turn`. Earlier turns that have no answer are left out. */
  messages(turn, system) {
    const earlier = this.turns.slice(0, this.turns.indexOf(turn)).filter(({ answer }) => answer.text);
    return [
      ...(system ? [{ role: "system", content: system }] : []),
      ...earlier.flatMap(({ question, answer }) => [
        { role: "user", content: question },
        { role: "assistant", content: answer.text },
      ]),
      { role: "user", content: turn.question },
    ];
  }
}

/** The record of a conversation in the storage as an object; null if it is none. */
export function readRecord(text) {
  try {
    const { title, turns, removed, changed } = JSON.parse(text);
    return {
      title: String(title ?? ""),
      turns: turns.map(readTurn),
      removed: (removed ?? []).map(String),
      changed: Number(changed) || 0,
    };
  } catch {
    return null;
  }
}

function readTurn({ id, at, question, answer }, i) {
  return { id: String(id ?? i), at: Number(at) || i, question: String(question), answer: readAnswer(answer) };
}

function makeId() {
  const [random] = crypto.getRandomValues(new Uint32Array(1));
  return `${Date.now().toString(36)}-${random.toString(36)}`;
}

/** The title of a conversation or of its record, or the beginning of its first message. */
export function nameOf({ title, turns }) {
  const line = (turns[0]?.question ?? "").trim().split("\n", 1)[0];
  return title || (line.length > 60 ? `${line.slice(0, 59)}\u2026` : line) || "New conversation";
}

function readAnswer(answer) {
  return { model: "", text: "", reasoning: "", calls: [], figures: "", ending: null, error: "", ...answer };
}

/** Add a chunk of the stream to an answer. */
export function addChunk(answer, chunk) {
  const choice = chunk.choices[0] ?? {};
  const delta = choice.delta ?? {};
  answer.text += delta.content ?? "";
  answer.reasoning += delta.reasoning_content ?? "";
  for (const { index, function: part } of delta.tool_calls ?? []) {
    const call = (answer.calls[index] ??= { name: "", arguments: "" });
    call.name += part.name ?? "";
    call.arguments += part.arguments ?? "";
  }
  answer.ending = choice.finish_reason ?? answer.ending;
  if (chunk.timings) answer.figures = describeFigures(chunk.timings);
}

/** The speed of an answer in words. */
export function describeFigures(timings) {
  const { predicted_n: tokens, predicted_per_second: speed, speedup: ratio, draft_n: drafted } = timings;
  const parts = [`${tokens} ${tokens === 1 ? "token" : "tokens"}`];
  if (speed) parts.push(`${speed.toFixed(1)} tok/s`);
  if (ratio) parts.push(`${ratio.toFixed(2)}x plain decoding`);
  if (drafted) parts.push(`${timings.draft_n_accepted} of ${drafted} drafted tokens accepted`);
  return parts.join(", ");
}
