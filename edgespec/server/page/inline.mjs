// Inline Markdown as a tree: strings, and elements {tag, children, href}. It has no other attributes and no HTML.

const PUNCTUATION = /[\p{P}\p{S}]/u;
const ESCAPABLE = /[!-/:-@[-`{-~]/;
const URL_START = /https?:\/\/[^\s<>`]+/y;
const ANGLED_URL = /<((?:https?:\/\/|mailto:)[^\s<>]+)>/y;
const LINE_BREAK = /<br\s*\/?>/iy;
const ENTITY = /&(?:amp|lt|gt|quot|nbsp|#39);/y;
const ENTITIES = { "&amp;": "&", "&lt;": "<", "&gt;": ">", "&quot;": '"', "&nbsp;": "\u00a0", "&#39;": "'" };
const DESTINATION = /\(\s*(?:<([^<>\n]*)>|((?:[^\s()<]|\([^\s()]*\))*))(?:\s+(?:"[^"]*"|'[^']*'))?\s*\)/y;
const TAGS = { "*": "em", _: "em", "**": "strong", __: "strong", "~~": "del" };
const ENDS = { "\\(": "\\)", "\\[": "\\]", $$: "$$" }; // of formulas
const DOLLARS = /\$(?![\s$])[^$\n]*[^\s$\\]\$(?!\d)|\$[^\s$\\]\$(?!\d)/y; // prices such as $5 and $6 are none
const MAX_OPEN = 64; // marks and brackets that are open at one place

/** The address if it may be followed, which is absolute and http, https or mailto; else null. */
export function safeAddress(text) {
  if (!/^(?:https?:\/\/|mailto:)/i.test(text)) return null;
  try {
    return new URL(text).href;
  } catch {
    return null;
  }
}

/** The nodes of a text. `isOpen`: more of it follows, so marks without an end yet are taken as if they had one. */
export function parseInline(text, isOpen = false) {
  return new InlineParser(text, isOpen).parse();
}

class InlineParser {
  constructor(text, isOpen) {
    this.text = text;
    this.isOpen = isOpen;
    this.at = 0;
    this.frames = [{ mark: null, children: [] }]; // the open marks and brackets, outermost first
    this.endless = new Set(); // lengths of runs of backticks, and ends of formulas, that do not follow
  }

  parse() {
    while (this.at < this.text.length) this.step();
    while (this.frames.length > 1) {
      const { mark, children } = this.frames.at(-1);
      if (this.isOpen && mark in TAGS && children.length) this.close(this.frames.length - 1, TAGS[mark]);
      else this.flatten(this.frames.length - 1);
    }
    return this.frames[0].children;
  }

  step() {
    const char = this.text[this.at];
    if (char === "\\" || char === "$") return this.formula() || this.escape(char);
    if (char === "`") return this.codeSpan();
    if (char === "*" || char === "_" || char === "~") return this.marks(char);
    if (char === "[" || (char === "!" && this.text[this.at + 1] === "[")) return this.openBracket(char);
    if (char === "]") return this.closeBracket();
    if (char === "<") return this.angle();
    if (char === "h" && this.bareAddress()) return undefined;
    if (char === "&") {
      const found = this.match(ENTITY);
      return this.take(found ? found[0].length : 1, found ? ENTITIES[found[0]] : "&");
    }
    let end = this.at + 1;
    while (end < this.text.length && !"\\$`*_~[]!<&h".includes(this.text[end])) end += 1;
    return this.take(end - this.at);
  }

  match(pattern) {
    pattern.lastIndex = this.at;
    return pattern.exec(this.text);
  }

  add(node) {
    const { children } = this.frames.at(-1);
    if (typeof node === "string" && typeof children.at(-1) === "string") children.push(children.pop() + node);
    else children.push(node);
  }

  take(count, text = this.text.slice(this.at, this.at + count)) {
    this.at += count;
    this.add(text);
  }

  /** Take a formula as it was written, with its marks. Returns whether there is one. */
  formula() {
    const end = this.findFormulaEnd();
    if (end < 0) return false;
    this.add({ tag: "span", children: [this.text.slice(this.at, end)] });
    this.at = end;
    return true;
  }

  findFormulaEnd() {
    const mark = ENDS[this.text.slice(this.at, this.at + 2)];
    if (!mark) return this.match(DOLLARS) ? DOLLARS.lastIndex : -1;
    const found = this.endless.has(mark) ? -1 : this.text.indexOf(mark, this.at + 2);
    if (found >= 0) return found + 2;
    this.endless.add(mark);
    return this.isOpen ? this.text.length : -1;
  }

  escape(char) {
    if (char === "$") return this.take(1);
    const next = this.text[this.at + 1] ?? "";
    this.take(ESCAPABLE.test(next) ? 2 : 1, ESCAPABLE.test(next) ? next : "\\");
    return undefined;
  }

  runLength(char, from = this.at) {
    let end = from;
    while (this.text[end] === char) end += 1;
    return end - from;
  }

  codeSpan() {
    const count = this.runLength("`");
    const start = this.at + count;
    let end = this.endless.has(count) ? -1 : this.text.indexOf("`", start);
    while (end >= 0) {
      const found = this.runLength("`", end);
      if (found === count) break;
      end = this.text.indexOf("`", end + found);
    }
    if (end < 0) {
      this.endless.add(count);
      if (!this.isOpen || count > 2 || start === this.text.length) return this.take(count);
    }
    const inside = this.text.slice(start, end < 0 ? undefined : end);
    const isPadded = inside.startsWith(" ") && inside.endsWith(" ") && inside.trim() !== "";
    this.add({ tag: "code", children: [isPadded ? inside.slice(1, -1) : inside] });
    this.at = end < 0 ? this.text.length : end + count;
    return undefined;
  }

  marks(char) {
    let count = this.runLength(char);
    const before = this.text[this.at - 1] ?? " ";
    const after = this.text[this.at + count] ?? " ";
    const isLeft = !/\s/.test(after) && (!PUNCTUATION.test(after) || /\s/.test(before) || PUNCTUATION.test(before));
    const isRight = !/\s/.test(before) && (!PUNCTUATION.test(before) || /\s/.test(after) || PUNCTUATION.test(after));
    const opens = isLeft && (char !== "_" || !isRight || PUNCTUATION.test(before));
    const closes = isRight && (char !== "_" || !isLeft || PUNCTUATION.test(after));
    this.at += count;
    while (closes && count) {
      const index = this.findMark(char, count);
      if (index < 0) break;
      const { mark } = this.frames[index];
      this.close(index, TAGS[mark]);
      count -= mark.length;
    }
    const isMark = char === "~" ? count === 2 : count <= 3;
    if (!opens || !isMark || this.frames.length > MAX_OPEN) return count && this.add(char.repeat(count));
    if (count >= 2) this.frames.push({ mark: char.repeat(2), children: [] });
    if (count % 2) this.frames.push({ mark: char, children: [] });
    return undefined;
  }

  /** The innermost open mark that `count` characters end, or -1. It lies inside the innermost bracket. */
  findMark(char, count) {
    let shorter = -1;
    for (let i = this.frames.length - 1; i > 0; i -= 1) {
      const { mark, children } = this.frames[i];
      if (mark[0] === "[" || mark[0] === "!") break;
      const isFilled = children.length > 0 || i < this.frames.length - 1;
      if (mark[0] !== char || !isFilled) continue;
      if (mark.length === count) return i;
      if (mark.length < count && shorter < 0) shorter = i;
    }
    return shorter;
  }

  /** Turn the frames from `index` on into plain text and nodes of the frame before them. */
  flatten(index) {
    for (const { mark, children } of this.frames.splice(index)) {
      this.add(mark);
      children.forEach((child) => this.add(child));
    }
  }

  close(index, tag, attributes = {}) {
    this.flatten(index + 1);
    const { children } = this.frames.pop();
    this.add({ tag, children, ...attributes });
  }

  openBracket(char) {
    const mark = char === "!" ? "![" : "[";
    if (this.frames.length > MAX_OPEN) return this.take(mark.length);
    this.at += mark.length;
    return this.frames.push({ mark, children: [] });
  }

  closeBracket() {
    const index = this.frames.findLastIndex(({ mark }) => mark === "[" || mark === "![");
    if (index < 0) return this.take(1);
    this.at += 1;
    const found = this.match(DESTINATION);
    const href = found && safeAddress(found[1] ?? found[2]);
    if (!href || this.frames.slice(0, index).some(({ mark }) => mark === "[")) {
      this.flatten(index); // a destination that is not followed stays as it was written
      return this.add("]");
    }
    this.at += found[0].length;
    return this.close(index, "a", { href });
  }

  angle() {
    const found = this.match(ANGLED_URL);
    const href = found && safeAddress(found[1]);
    if (href) {
      this.at += found[0].length;
      return this.add({ tag: "a", href, children: [found[1]] });
    }
    const lineBreak = this.match(LINE_BREAK);
    return lineBreak ? this.take(lineBreak[0].length, "\n") : this.take(1);
  }

  bareAddress() {
    if (/[\p{L}\p{N}]/u.test(this.text[this.at - 1] ?? " ")) return false;
    const found = this.match(URL_START);
    if (!found) return false;
    let end = found[0].length;
    const hasBracket = found[0].includes("(");
    while (".,:;!?'\"*_~]|".includes(found[0][end - 1]) || (found[0][end - 1] === ")" && !hasBracket)) end -= 1;
    const shown = found[0].slice(0, end);
    const href = safeAddress(shown);
    if (!href || this.frames.some(({ mark }) => mark === "[")) return false;
    this.at += end;
    this.add({ tag: "a", href, children: [shown] });
    return true;
  }
}
