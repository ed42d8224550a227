// The conversation: its turns, what is sent of them, and their place in the browser's storage.

/** Of the browser's storage. */
export const KEY = "edgespec.conversation";

/** A turn is {question, answer}; an answer {model, text, reasoning, calls, figures, ending, error}. */
export class Conversation {
  constructor(storage) {
    this.storage = storage;
    this.turns = [];
    this.load();
  }

  load() {
    try {
      const turns = JSON.parse(this.storage.getItem(KEY)) ?? [];
      this.turns = turns.map(({ question, answer }) => ({ question: String(question), answer: readAnswer(answer) }));
    } catch {
      this.turns = [];
    }
  }

  /** Keep the turns in the storage. Returns whether they fit. */
  save() {
    try {
      if (this.turns.length) this.storage.setItem(KEY, JSON.stringify(this.turns));
      else this.storage.removeItem(KEY);
      return true;
    } catch {
      return false;
    }
  }

  clear() {
    this.turns = [];
    this.save();
  }

  /** Begin a turn. */
  ask(question, model) {
    const turn = { question, answer: readAnswer({ model }) };
    this.turns.push(turn);
    return turn;
  }

  /** The messages of a request for the last answer. Earlier turns that have no answer are left out. */
  messages(system) {
    const last = this.turns.at(-1);
    const earlier = this.turns.slice(0, -1).filter(({ answer }) => answer.text);
    return [
      ...(system ? [{ role: "system", content: system }] : []),
      ...earlier.flatMap(({ question, answer }) => [
        { role: "user", content: question },
        { role: "assistant", content: answer.text },
      ]),
      { role: "user", content: last.question },
    ];
  }
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
