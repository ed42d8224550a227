// Markdown as a tree that grows with the text: each line is read once, and what is above it does not change.
//
// Nodes are {tag, children}; leaves of text {tag, text, isOpen}. Indented code and HTML are plain text.

const MAX_LINE = 10_000; // characters; a longer line is read in parts
const MAX_DEPTH = 16; // quotes and lists within each other
const FENCE = /^( *)(`{3,}|~{3,})[ \t]*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+(.*))?$/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}> ?/;
const MARKER = /^( *)([-+*]|\d{1,9}[.)])( +|$)/;
const FORMULA = /^ *(\\\[|\$\$)/;
const FORMULA_ENDS = { "\\[": "\\]", $$: "$$" };
const DELIMITER_ROW = /^[ \t|:-]+$/;

export class Markdown {
  constructor() {
    this.root = { tag: "div", children: [] };
    this.open = [{ kind: "root", node: this.root }]; // containers, then perhaps a leaf
    this.rest = ""; // of the last line, which is not whole yet
    this.undo = null;
  }

  /** Add text. The tree then has all of it. */
  push(text) {
    this.undo?.();
    this.undo = null;
    const lines = (this.rest + text).split("\n");
    this.rest = lines.pop();
    for (const line of lines) this.readBlock(this.readParts(line.endsWith("\r") ? line.slice(0, -1) : line), "\n");
    this.rest = this.readParts(this.rest);
    if (this.rest) {
      this.undo = this.snapshot();
      this.readBlock(this.rest, "");
    }
  }

  /** The text is complete. */
  finish() {
    if (this.rest) this.push("\n");
    this.closeTo(1);
  }

  /** A function that takes back the reading of what follows. */
  snapshot() {
    const open = [...this.open];
    const saved = open.map(({ node }) => [node, node.text, node.children?.length, node.children?.at(-1)]);
    return () => {
      this.open = open;
      for (const [node, text, length, last] of saved) {
        node.isOpen = true;
        if (text !== undefined) node.text = text;
        else node.children.splice(Math.max(0, length - 1), Infinity, ...(length ? [last] : []));
      }
    };
  }

  /** Read a line up to its last part, which is returned. */
  readParts(line) {
    let start = 0;
    for (; line.length - start > MAX_LINE; start += MAX_LINE) this.readBlock(line.slice(start, start + MAX_LINE), "");
    return line.slice(start);
  }

  get leaf() {
    const last = this.open.at(-1);
    return last.kind === "code" || last.kind === "text" || last.kind === "table" || last.kind === "formula" ? last : null;
  }

  closeTo(length) {
    for (const { node } of this.open.splice(length)) node.isOpen = false;
  }

  closeLeaf() {
    if (this.leaf) this.closeTo(this.open.length - 1);
  }

  add(node, kind, more = {}) {
    node.isOpen = kind !== undefined;
    this.open.at(-1).node.children.push(node);
    if (kind) this.open.push({ kind, node, ...more });
  }

  /** Read a line, or a part of a long one; `ending` is what ends it. */
  readBlock(line, ending) {
    let rest = line.replace(/^[ \t]*/, (space) => space.replaceAll("\t", "    "));
    let depth = 1;
    for (; depth < this.open.length; depth += 1) {
      const inner = enter(this.open[depth], rest);
      if (inner === null) break;
      rest = inner;
    }
    const leaf = this.leaf;
    const isInside = depth >= this.open.length - (leaf ? 1 : 0); // all quotes and items go on
    if (!isInside && this.open[depth - 1].kind === "list") depth -= 1; // its next item opens it again
    if (isInside && leaf?.kind === "code") return this.readCode(leaf, rest, ending);
    if (isInside && leaf?.kind === "formula" && rest.trim() !== "") return this.readFormula(leaf, rest);
    const isText = rest.trim() !== "" && !startsBlock(rest);
    if (!isInside && leaf?.kind === "text" && isText) return this.addText(leaf, rest); // a quote may go on like this
    if (!isInside) this.closeTo(depth);
    if (rest.trim() === "") return this.closeLeaf();
    return this.readContent(rest);
  }

  readCode({ node, fence, indent }, rest, ending) {
    const line = rest.slice(Math.min(indent, rest.search(/[^ ]|$/)));
    const mark = line.trim();
    const isEnd = mark.length >= fence.length && mark === fence[0].repeat(mark.length);
    const mayEnd = ending === "" && fence.startsWith(mark); // the line is not whole
    if (isEnd) this.closeLeaf();
    else if (!mayEnd && (line || ending)) node.children.push(line + ending);
  }

  /** A formula stays as it was written. A blank line ends it too, as in TeX. */
  readFormula({ node, end }, rest) {
    node.children.push(`\n${rest}`);
    if (rest.includes(end)) this.closeLeaf();
  }

  /** Read the content of a line that is inside `open`. */
  readContent(line) {
    let rest = line;
    for (;;) {
      const quote = QUOTE.exec(rest);
      const item = RULE.test(rest) ? null : findItem(rest, this.leaf?.kind === "text");
      if ((!quote && !item) || this.open.length > MAX_DEPTH) break;
      this.closeLeaf();
      if (quote) this.add({ tag: "blockquote", children: [] }, "quote");
      else this.addItem(item);
      rest = quote ? rest.slice(quote[0].length) : item.text;
      if (rest.trim() === "") return undefined;
    }
    const fence = FENCE.exec(rest);
    const heading = HEADING.exec(rest);
    if (fence) {
      this.closeLeaf();
      const node = { tag: "pre", language: fence[3].trim().split(/\s/)[0], children: [] };
      return this.add(node, "code", { fence: fence[2], indent: fence[1].length });
    }
    if (heading) {
      this.closeLeaf();
      return this.add({ tag: `h${heading[1].length}`, text: (heading[2] ?? "").replace(/(?:^| )#+ *$/, "") });
    }
    const end = findFormula(rest);
    if (end) {
      this.closeLeaf();
      return this.add({ tag: "p", children: [rest] }, "formula", { end });
    }
    if (RULE.test(rest)) {
      this.closeLeaf();
      return this.add({ tag: "hr", children: [] });
    }
    if (this.leaf?.kind === "text") return this.startTable(this.leaf, rest) || this.addText(this.leaf, rest);
    if (this.leaf?.kind === "table") return this.leaf.node.children.push(makeRow("td", rest, this.leaf.sides));
    return this.add({ tag: "p", text: rest }, "text");
  }

  addItem({ indent, isOrdered, number }) {
    const parent = this.open.at(-1).node;
    const tag = isOrdered ? "ol" : "ul";
    let list = parent.children.at(-1);
    if (list?.tag !== tag) {
      list = { tag, children: [], ...(isOrdered && { start: number }) };
      parent.children.push(list);
    }
    const node = { tag: "li", children: [], isOpen: true };
    list.children.push(node);
    this.open.push({ kind: "list", node: list }, { kind: "item", node, indent });
  }

  addText({ node }, rest) {
    if (node.text.length + rest.length <= MAX_LINE) {
      node.text += `\n${rest}`;
      return;
    }
    this.closeLeaf();
    this.add({ tag: "p", text: rest }, "text");
  }

  /** Whether `rest` is the row below the names of a table's columns. It then becomes one. */
  startTable({ node }, rest) {
    if (!DELIMITER_ROW.test(rest) || !rest.includes("-") || !rest.includes("|")) return false;
    const above = node.text.lastIndexOf("\n");
    const head = node.text.slice(above + 1);
    if (!head.includes("|")) return false;
    const sides = splitRow(rest).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : ""));
    if (splitRow(head).length !== sides.length) return false;
    this.closeLeaf();
    const siblings = this.open.at(-1).node.children;
    siblings.pop();
    if (above > 0) siblings.push({ tag: "p", text: node.text.slice(0, above), isOpen: false });
    this.add({ tag: "table", children: [makeRow("th", head, sides)] }, "table", { sides });
    return true;
  }
}

/** What is left of a line inside an open block, or null where the block has ended. */
function enter({ kind, indent }, rest) {
  if (kind === "quote") {
    const quote = QUOTE.exec(rest);
    return quote ? rest.slice(quote[0].length) : null;
  }
  if (kind === "item") return rest.trim() === "" ? "" : rest.search(/[^ ]/) >= indent ? rest.slice(indent) : null;
  return kind === "list" ? rest : null;
}

function startsBlock(rest) {
  return [FENCE, HEADING, RULE, QUOTE, MARKER].some((pattern) => pattern.test(rest));
}

/** The item of a list that a line starts, or null. A paragraph is interrupted by 1. and by no other number. */
function findItem(rest, isParagraph) {
  const found = MARKER.exec(rest);
  if (!found) return null;
  const [all, before, marker, after] = found;
  const isOrdered = marker.length > 1;
  const number = Number.parseInt(marker, 10);
  if (isParagraph && (after === "" || (isOrdered && number !== 1))) return null;
  const indent = after.length > 4 || after === "" ? before.length + marker.length + 1 : all.length;
  const text = rest.slice(indent).replace(/^\[ \] /, "\u2610 ").replace(/^\[[xX]\] /, "\u2611 ");
  return { indent, isOrdered, number, text };
}

/** The mark that ends the formula which a line begins, and which goes on behind it; else null. */
function findFormula(rest) {
  const found = FORMULA.exec(rest);
  if (!found) return null;
  const end = FORMULA_ENDS[found[1]];
  return rest.includes(end, found[0].length) ? null : end;
}

function splitRow(line) {
  const cells = line.trim().replace(/^\|/, "").split(/(?<!\\)\|/);
  if (cells.length > 1 && cells.at(-1).trim() === "") cells.pop();
  return cells.map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function makeRow(tag, line, sides) {
  const cells = splitRow(line);
  const children = sides.map((side, i) => ({ tag, text: cells[i] ?? "", side, isOpen: false }));
  return { tag: "tr", children };
}
