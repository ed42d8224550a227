// The trees of markdown.mjs as elements. What has not changed since the last call is left as it is.

import { parseInline } from "./inline.mjs";

/** An element with properties, and `aria-` attributes, and children. Text is never read as HTML. */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("aria-") || name === "role") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children);
  return element;
}

/** Shows a tree in an element that it owns. */
export class Mirror {
  constructor(element) {
    this.views = new WeakMap(); // node -> {element, body, shown}
    this.element = element;
  }

  show(root) {
    if (!this.views.has(root)) this.views.set(root, { element: this.element, body: this.element, shown: [] });
    this.update(root);
  }

  /** The tree changes at its end only: the last child that is still there is looked into, those before are not. */
  update(node) {
    const view = this.views.get(node);
    if (node.text !== undefined) {
      if (view.text === node.text && view.isOpen === node.isOpen) return;
      Object.assign(view, { text: node.text, isOpen: node.isOpen });
      view.body.replaceChildren(...parseInline(node.text, node.isOpen).map(makeInline));
      return;
    }
    const { body, shown } = view;
    const { children } = node;
    let kept = Math.min(shown.length, children.length);
    while (kept > 0 && shown[kept - 1].child !== children[kept - 1]) kept -= 1;
    for (const { element } of shown.splice(kept)) element.remove();
    if (kept > 0 && typeof children[kept - 1] !== "string") this.update(children[kept - 1]);
    for (const child of children.slice(kept)) {
      const element = this.create(child);
      body.append(element);
      shown.push({ child, element });
    }
  }

  create(node) {
    if (typeof node === "string") return document.createTextNode(node);
    const view = node.tag === "pre" ? makeCode(node) : makeBlock(node);
    this.views.set(node, { ...view, shown: [] });
    this.update(node);
    return view.element;
  }
}

function makeBlock({ tag, start, side }) {
  const element = make(tag);
  if (start !== undefined) element.start = start;
  if (side) element.className = side;
  if (tag !== "table") return { element, body: element };
  return { element: make("div", { className: "wide" }, element), body: element };
}

function makeCode({ language }) {
  const body = make("code");
  const copy = make("button", { type: "button", textContent: "Copy" });
  copy.addEventListener("click", () => copyText(copy, body));
  const head = make("figcaption", {}, make("span", { textContent: language || "code" }), copy);
  const name = language ? `code in ${language}` : "code";
  const text = make("pre", { tabIndex: 0, role: "group", "aria-label": name }, body);
  return { element: make("figure", {}, head, text), body };
}

/** Copy; without access to the clipboard (plain http from another machine) the text is selected instead. */
async function copyText(button, code) {
  try {
    await navigator.clipboard.writeText(code.textContent);
    button.textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(code);
    button.textContent = "Press Ctrl+C";
  }
  setTimeout(() => { button.textContent = "Copy"; }, 2000);
}

function makeInline(node) {
  if (typeof node === "string") return document.createTextNode(node);
  const element = make(node.tag, {}, ...node.children.map(makeInline));
  if (node.tag === "a") Object.assign(element, { href: node.href, target: "_blank", rel: "noopener noreferrer" });
  return element;
}
