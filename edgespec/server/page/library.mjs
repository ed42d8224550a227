// The conversations in the browser's storage, each under a key of its own.

import { Conversation, PREFIX, nameOf, readRecord } from "./conversation.mjs";

const FORMER_KEY = "edgespec.conversation"; // of the one conversation that earlier versions kept

export class Library {
  constructor(storage) {
    this.storage = storage;
    this.adoptFormer();
  }

  adoptFormer() {
    const turns = this.storage.getItem(FORMER_KEY);
    if (turns === null) return;
    const { key } = new Conversation(this.storage);
    this.storage.removeItem(FORMER_KEY); // there may be no room for both
    try {
      if (readRecord(`{"turns": ${turns}}`)) this.storage.setItem(key, `{"changed": ${Date.now()}, "turns": ${turns}}`);
    } catch {
      this.storage.setItem(FORMER_KEY, turns);
    }
  }

  /** The conversations that have all words of `search`, the last changed first: {id, name, changed}. */
  list(search = "") {
    const words = search.toLowerCase().split(/\s+/).filter(Boolean);
    const found = [];
    for (let i = 0; i < this.storage.length; i += 1) {
      const key = this.storage.key(i);
      const record = key.startsWith(PREFIX) ? readRecord(this.storage.getItem(key)) : null;
      if (!record) continue;
      const { title, turns, changed } = record;
      const texts = [title, ...turns.flatMap(({ question, answer }) => [question, answer.text])];
      const text = texts.join("\n").toLowerCase();
      if (!words.every((word) => text.includes(word))) continue;
      found.push({ id: key.slice(PREFIX.length), name: nameOf(record), changed });
    }
    return found.sort((one, two) => two.changed - one.changed);
  }

  open(id) {
    return new Conversation(this.storage, id);
  }

  remove(id) {
    this.storage.removeItem(PREFIX + id);
  }
}

/** A conversation as the file that `edgespec chat` exports and imports. */
export function toFile(conversation, system) {
  const turns = conversation.turns.flatMap(({ at, question, answer }, i) => [
    makeTurn(2 * i + 1, "user", { text: question, created: at / 1000 }),
    makeTurn(2 * i + 2, "assistant", { text: answer.text, reasoning: answer.reasoning, created: at / 1000 }),
  ]);
  const changed = turns.at(-1)?.created ?? 0;
  const file = {
    edgespec_conversation: 1,
    title: conversation.name,
    renamed: Boolean(conversation.title),
    model: conversation.turns.at(-1)?.answer.model ?? "",
    system: system || null,
    leaf: turns.length || null,
    created: turns[0]?.created ?? 0,
    changed,
    turns,
  };
  return `${JSON.stringify(file, null, 1)}\n`;
}

function makeTurn(id, role, more) {
  const empty = { reasoning: "", spans: [], settings: {}, metrics: {}, finished: true };
  return { id, parent: id > 1 ? id - 1 : null, role, ...empty, ...more };
}
