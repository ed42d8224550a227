import assert from "node:assert/strict";
import { test } from "node:test";

import { parseInline, safeAddress } from "../../../edgespec/server/page/inline.mjs";
import { Markdown } from "../../../edgespec/server/page/markdown.mjs";
import { format, html, read, walk } from "./trees.mjs";

const CASES = [
  ["# One *two* #\ntext", "<h1>One <em>two</em></h1><p>text</p>"],
  ["**a *b* c** ***d*** __e__ ~~f~~", "<p><strong>a <em>b</em> c</strong> <strong><em>d</em></strong> <strong>e</strong> <del>f</del></p>"],
  ["snake_case_name 2 * 3 * 4 **open \\*x\\*", "<p>snake_case_name 2 * 3 * 4 **open *x*</p>"],
  ["`a` ``b`c`` `open &amp; &x;", "<p><code>a</code> <code>b`c</code> `open &amp; &amp;x;</p>"],
  ["[a](http://x.y/(z)) <mailto:a@b.c> https://q.r/s.", '<p><a href="http://x.y/(z)">a</a> <a href="mailto:a@b.c">mailto:a@b.c</a> <a href="https://q.r/s">https://q.r/s</a>.</p>'],
  ["```py\nif x:\n    <b>\n```\nafter", '<pre language="py">if x:\n    &lt;b>\n</pre><p>after</p>'],
  ["~~~\n```\n~~~~\n```\nopen", "<pre>```\n</pre><pre>open\n</pre>"],
  ["- a\n- b\n  - c\n    d\n\n  e\n- [x] f", "<ul><li><p>a</p></li><li><p>b</p><ul><li><p>c\nd</p></li></ul><p>e</p></li><li><p>\u2611 f</p></li></ul>"],
  ["3. a\n   ```\n   b\n   ```\n4. c\n\nd", '<ol start="3"><li><p>a</p><pre>b\n</pre></li><li><p>c</p></li></ol><p>d</p>'],
  ["> a\n> - b\nlazy\n\nc", "<blockquote><p>a</p><ul><li><p>b\nlazy</p></li></ul></blockquote><p>c</p>"],
  ["a | b\n--|:-:\n1 | `x\\|y`\n2\n\nc", '<table><tr><th>a</th><th side="center">b</th></tr><tr><td>1</td><td side="center"><code>x|y</code></td></tr><tr><td>2</td><td side="center"></td></tr></table><p>c</p>'],
  ["is \\(a_1*b*c_2\\) and $x*y*z$, \\(open, $5 and *b* $6 \\$1", "<p>is <span>\\(a_1*b*c_2\\)</span> and <span>$x*y*z$</span>, (open, $5 and <em>b</em> $6 $1</p>"],
  ["so\n\\[\n- a_b_c\n+ 1\n\\]\nas $$ [x](y) $$", "<p>so</p><p>\\[\n- a_b_c\n+ 1\n\\]</p><p>as <span>$$ [x](y) $$</span></p>"],
  ["$$\n= *b*\n\n# c", "<p>$$\n= *b*</p><h1>c</h1>"],
  ["a\n1986. b\n***\nc", "<p>a\n1986. b</p><hr></hr><p>c</p>"],
];
const HOSTILE = [
  "<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "[a](javascript:alert(1))", "![a](data:text/html,x)",
  "[a](JaVaScRiPt:alert(1))", "[a](&#106;avascript:alert(1))", "[a](java\tscript:alert(1))", "<javascript:alert(1)>",
  "[a](vbscript:x)", "[a](//evil.example)", "[a](/unload)", "[a](http://)", '[a](http://x"onclick="y)', "[[a](http://b)](http://c)",
  "```<script>\n</script>", "| <script> |\n|-|\n| <b onclick=x> |", "\u0000\ud800[", "[a](http://b.c \"t\" onclick=x)",
];
const LONG = ["*a ", "[", "![a](", "`", "``` ", ">", "- ", "|", "_a_ ", "http://", "&", "<", "#", "\\", "***a_", "- a\n", "a|b\n", "[a](b ",
  "\\(", "$a ", "$$", "\\[\n"];
const TAGS = new Set(["div", "p", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "pre", "code", "blockquote", "ul", "ol", "li",
  "table", "tr", "th", "td", "em", "strong", "del", "a", "span"]);

test("what is written is what is shown", () => {
  for (const [text, wanted] of CASES) assert.equal(html(text), wanted, text);
});

test("a text in pieces is the text at once", () => {
  const text = CASES.map(([source]) => source).join("\n\n") + "\r\n" + HOSTILE.join("\n\n");
  const whole = format(read([text]));
  for (const size of [1, 2, 3, 7, 64]) {
    assert.equal(format(read(text.match(new RegExp(`[^]{1,${size}}`, "g")))), whole, `pieces of ${size}`);
  }
});

test("no text is run, and addresses are http, https or mailto", () => {
  for (const text of [...HOSTILE, HOSTILE.join(" "), HOSTILE.join("\n")]) {
    for (const node of walk(read([text]))) {
      if (typeof node === "string") continue;
      assert.ok(TAGS.has(node.tag), node.tag);
      if (node.tag === "a") assert.match(node.href, /^(https?:\/\/[^/]|mailto:)\S*$/);
    }
  }
  for (const text of HOSTILE.slice(0, 9)) assert.doesNotMatch(html(text), /<a /, text);
  assert.equal(html(HOSTILE[0]), "<p>&lt;script>alert(1)&lt;/script></p>");
  assert.equal(safeAddress("javascript:alert(1)"), null);
});

test("while a text arrives, marks without an end are taken to have one", () => {
  assert.deepEqual(parseInline("a **b", true), ["a ", { tag: "strong", children: ["b"] }]);
  assert.deepEqual(parseInline("a `b", true), ["a ", { tag: "code", children: ["b"] }]);
  assert.deepEqual(parseInline("a **b"), ["a **b"]);
  const markdown = new Markdown();
  markdown.push("a\n#"); // a heading, until there is more of it
  markdown.push("b *c");
  assert.deepEqual(markdown.root.children, [{ tag: "p", text: "a\n#b *c", isOpen: true }]);
  markdown.push("\n```\nd\n``");
  assert.deepEqual(markdown.root.children.at(-1).children, ["d\n"]);
});

test("what has been read is not read again", () => {
  const markdown = new Markdown();
  const kept = [];
  for (let i = 0; i < 200; i += 1) {
    markdown.push(`paragraph ${i}\n\n- item\n  - inner\n\n`);
    for (const [at, node] of kept.entries()) assert.equal(markdown.root.children[at], node);
    kept.push(...markdown.root.children.slice(kept.length, -1));
  }
  assert.equal(kept.length, 399);
});

test("a megabyte in one line is read in parts, and nests a few levels", () => {
  for (const unit of LONG) {
    const markdown = new Markdown();
    const text = unit.repeat(Math.ceil(1e5 / unit.length));
    for (let i = 0; i < text.length; i += 9_999) markdown.push(text.slice(i, i + 9_999));
    for (let depth = 0, node = markdown.root; node.children?.length; depth += 1, node = node.children.at(-1)) {
      assert.ok(depth < 40, unit);
      for (const { text: line = "" } of node.children) assert.ok(line.length <= 10_000, unit);
    }
    markdown.finish();
    for (const node of walk(markdown.root)) assert.ok(typeof node === "string" || TAGS.has(node.tag));
  }
  const line = "word ".repeat(2e5);
  assert.equal([...walk(read([line]))].filter((node) => typeof node === "string").join(""), line);
});
