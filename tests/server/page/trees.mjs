// Markdown as HTML, in which tests compare it.

import { parseInline } from "../../../edgespec/server/page/inline.mjs";
import { Markdown } from "../../../edgespec/server/page/markdown.mjs";

const escape = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;");

export function format(node) {
  if (typeof node === "string") return escape(node);
  const children = node.text === undefined ? node.children : parseInline(node.text, node.isOpen);
  const attributes = ["href", "start", "language", "side"].filter((name) => node[name] || node[name] === 0);
  const head = [node.tag, ...attributes.map((name) => `${name}="${node[name]}"`)].join(" ");
  return `<${head}>${children.map(format).join("")}</${node.tag}>`;
}

/** The tree of a text that arrives in `pieces`, and is complete. */
export function read(pieces) {
  const markdown = new Markdown();
  for (const piece of pieces) markdown.push(piece);
  markdown.finish();
  return markdown.root;
}

/** Every node of a tree, with those of its text. */
export function* walk(node) {
  yield node;
  if (typeof node === "string") return;
  const children = node.text === undefined ? node.children : parseInline(node.text, node.isOpen);
  for (const child of children) yield* walk(child);
}

export const html = (text) => read([text]).children.map(format).join("");
