// The turns of a conversation on the page.

import { Mirror, make } from "./dom.mjs";
import { Markdown } from "./markdown.mjs";

const ENDINGS = { length: "cut off at the limit of tokens", stopped: "stopped" };

/** One turn: the question, and the answer as it arrives. `actions`: {retry(), edit(text), copy(text)}. */
export class TurnView {
  constructor(turn, actions) {
    this.turn = turn;
    this.actions = actions;
    this.form = null; // of an edit
    this.answer = make("div", { className: "answer", role: "group" });
    this.element = make("article", { className: "turn" }, this.makeQuestion(), this.answer);
    this.calls = make("div");
    this.notes = make("div", { className: "actions" });
    this.build();
  }

  makeQuestion() {
    this.text = make("p", { textContent: this.turn.question });
    this.edit = make("button", { type: "button", textContent: "Edit", "aria-label": "Edit this message" });
    this.edit.addEventListener("click", () => this.startEdit());
    const bar = make("div", { className: "actions" }, this.edit);
    return make("div", { className: "question", role: "group", "aria-label": "You" }, makeRole("You"), this.text, bar);
  }

  /** Write the answer anew. */
  build() {
    const { answer } = this.turn;
    this.shown = { text: 0, reasoning: 0 };
    this.thought = make("pre", { className: "thought" });
    this.reasoning = make("details", { hidden: true }, make("summary", { textContent: "Thinking" }), this.thought);
    this.body = make(answer.isRaw ? "pre" : "div", { className: answer.isRaw ? "raw" : "markdown" });
    this.markdown = answer.isRaw ? null : new Markdown();
    this.mirror = new Mirror(this.body);
    this.error = make("p", { className: "error", role: "alert", hidden: true });
    this.answer.setAttribute("aria-label", answer.model);
    this.answer.replaceChildren(makeRole(answer.model), this.reasoning, this.body, this.calls, this.error, this.notes);
    this.update();
  }

  /** Show what the answer has gained. */
  update() {
    const { answer } = this.turn;
    const thought = answer.reasoning.slice(this.shown.reasoning);
    const text = answer.text.slice(this.shown.text);
    this.shown = { text: answer.text.length, reasoning: answer.reasoning.length };
    if (thought) this.thought.append(thought);
    this.reasoning.hidden = !answer.reasoning.trim();
    if (text && this.markdown) {
      this.markdown.push(text);
      this.mirror.show(this.markdown.root);
    } else if (text) this.body.append(text);
    this.calls.replaceChildren(...answer.calls.map(makeCall));
  }

  begin() {
    this.answer.setAttribute("aria-busy", "true");
    this.notes.replaceChildren();
    this.edit.hidden = true;
  }

  /** The answer is complete, or has failed. `isLast`: it may be asked for again. */
  finish(isLast) {
    const { answer } = this.turn;
    this.wasLast = isLast;
    this.update();
    if (this.markdown) {
      this.markdown.finish();
      this.mirror.show(this.markdown.root);
    }
    this.answer.setAttribute("aria-busy", "false");
    this.error.textContent = answer.error;
    this.error.hidden = !answer.error;
    const ending = answer.error ? "" : answer.ending ? ENDINGS[answer.ending] : "not complete";
    const notes = [answer.figures, ending].filter(Boolean).join(", ");
    this.notes.replaceChildren(...(notes ? [make("p", { textContent: notes })] : []), ...this.makeButtons(isLast));
    this.endEdit();
    this.edit.hidden = !isLast;
  }

  makeButtons(isLast) {
    const { answer } = this.turn;
    const copy = make("button", { type: "button", textContent: "Copy", "aria-label": "Copy this answer" });
    copy.addEventListener("click", () => this.actions.copy(answer.text));
    const retry = make("button", { type: "button", textContent: "Retry", "aria-label": "Retry this answer" });
    retry.addEventListener("click", () => this.actions.retry());
    return [...(answer.text ? [copy] : []), ...(isLast ? [retry] : [])];
  }

  startEdit() {
    const field = make("textarea", { value: this.turn.question, rows: 3, "aria-label": "Message" });
    const send = make("button", { textContent: "Send" });
    const cancel = make("button", { type: "button", textContent: "Cancel" });
    const form = make("form", {}, field, make("div", { className: "actions" }, send, cancel));
    const close = () => {
      this.endEdit();
      this.edit.focus();
    };
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (field.value.trim()) this.actions.edit(field.value);
    });
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") close();
      submitOnEnter(event);
    });
    cancel.addEventListener("click", close);
    this.text.replaceWith(form);
    this.form = form;
    this.edit.hidden = true;
    field.focus();
  }

  endEdit() {
    this.form?.replaceWith(this.text);
    this.form = null;
    this.edit.hidden = false;
  }
}

/** Enter sends the form of a field; Shift+Enter, and an Enter that ends an input method's word, do not. */
export function submitOnEnter(event) {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  event.target.form.requestSubmit();
}

function makeRole(name) {
  return make("h2", { className: "role", textContent: name });
}

function makeCall({ name, arguments: text }) {
  const summary = make("summary", { textContent: `Tool call: ${name}` });
  return make("details", { className: "call", open: true }, summary, make("pre", { textContent: indent(text) }));
}

function indent(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
