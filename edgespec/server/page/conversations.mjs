// The dialog with the list of conversations.

import { make } from "./dom.mjs";

/** `actions`: {open(id), rename(id, name), remove(id, name), save(id)}. */
export class ConversationList {
  constructor(dialog, library, actions) {
    Object.assign(this, { dialog, library, actions });
    this.search = dialog.querySelector("input");
    this.list = dialog.querySelector("ul");
    this.search.addEventListener("input", () => this.update());
  }

  show() {
    this.search.value = "";
    this.update();
    this.dialog.showModal();
  }

  update() {
    const found = this.library.list(this.search.value);
    const empty = make("li", { textContent: this.search.value ? "No conversation has these words." : "None yet." });
    this.list.replaceChildren(...(found.length ? found.map((each) => this.makeItem(each)) : [empty]));
  }

  makeItem({ id, name, changed }) {
    const open = make("button", { type: "button", className: "name", textContent: name });
    open.addEventListener("click", () => {
      this.dialog.close();
      this.actions.open(id);
    });
    const when = make("small", { textContent: new Date(changed).toLocaleString() });
    const bar = ["Rename", "Export", "Delete"].map((word) => this.makeButton(word, id, name));
    return make("li", {}, open, make("div", { className: "actions" }, when, ...bar));
  }

  makeButton(word, id, name) {
    const button = make("button", { type: "button", textContent: word, "aria-label": `${word} ${name}` });
    const act = { Rename: this.actions.rename, Export: this.actions.save, Delete: this.actions.remove }[word];
    button.addEventListener("click", () => {
      act(id, name);
      this.update();
    });
    return button;
  }
}
