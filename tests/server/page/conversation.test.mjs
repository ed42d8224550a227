import assert from "node:assert/strict";
import { writeFileSync } from "node:fs";
import { createServer } from "node:http";
import { test } from "node:test";

import { Conversation, PREFIX, addChunk, describeFigures } from "../../../edgespec/server/page/conversation.mjs";
import { Library, toFile } from "../../../edgespec/server/page/library.mjs";
import { streamChat } from "../../../edgespec/server/page/stream.mjs";

const CALL = `${process.env.EDGESPEC_URL}/v1/chat/completions`;

class Storage extends Map {
  get length() { return this.size; }
  key(i) { return [...this.keys()][i]; }
  getItem(key) { return this.get(key) ?? null; }
  setItem(key, value) { if (value.length > 2000) throw new Error("full"); this.set(key, value); }
  removeItem(key) { this.delete(key); }
}

async function collect(body) {
  const { answer } = new Conversation(new Storage()).ask("x", body.model);
  for await (const chunk of streamChat(CALL, body, null)) addChunk(answer, chunk);
  return answer;
}

test("a conversation is kept, and what has no answer is not sent again", () => {
  const storage = new Storage();
  const conversation = new Conversation(storage);
  conversation.ask("one", "a").answer.text = "1";
  conversation.ask("failed", "a").answer.error = "no";
  const turn = conversation.ask("three", "a");
  const expected = ["one", "1", "three"];
  assert.deepEqual(conversation.messages(turn, "").map(({ content }) => content), expected);
  assert.deepEqual(conversation.messages(turn, "be brief")[0], { role: "system", content: "be brief" });
  assert.ok(conversation.save());
  const again = new Conversation(storage, conversation.id);
  assert.deepEqual(again.turns, conversation.turns);
  again.ask("x".repeat(3000), "a");
  assert.ok(!again.save());
  for (const text of ["{", "{}", "[1]", '{"turns": [null]}', '{"turns": [{"question": "x"}]}']) {
    const { turns } = new Conversation(new Storage([[`${PREFIX}x`, text]]), "x");
    assert.ok(turns.every(({ question, answer }) => typeof question === "string" && answer.text === ""), text);
  }
});

test("two tabs with one conversation keep the answers of both, and what was asked again stays away", () => {
  const storage = new Storage();
  const one = new Conversation(storage);
  const first = one.ask("first", "a");
  one.save();
  const other = new Conversation(storage, one.id);
  const second = other.ask("second", "a");
  other.save();
  first.answer.text = "1"; // while this tab knows nothing of the second turn
  one.save();
  second.answer.text = "2";
  other.save();
  one.load();
  for (const { turns } of [one, other, new Conversation(storage, one.id)]) {
    assert.deepEqual(turns.map(({ question, answer }) => [question, answer.text]), [["first", "1"], ["second", "2"]]);
  }
  one.remove(second);
  one.ask("third", "a");
  one.save();
  other.save();
  assert.deepEqual(other.turns.map(({ question }) => question), ["first", "third"]);
  one.rename(" Name ");
  other.save();
  assert.equal(new Conversation(storage, one.id).name, "Name");
});

test("a conversation that another tab has deleted is kept where its answer is written", () => {
  const storage = new Storage();
  const conversation = new Conversation(storage);
  conversation.ask("one", "a");
  conversation.save();
  new Library(storage).remove(conversation.id);
  conversation.ask("two", "a");
  conversation.save();
  assert.equal(new Conversation(storage, conversation.id).turns.length, 2);
});

test("conversations are listed, searched, renamed and deleted", () => {
  const storage = new Storage([["edgespec.conversation", '[{"question": "An old one", "answer": {"text": "yes"}}]'], ["x", "1"]]);
  const library = new Library(storage);
  assert.deepEqual(library.list().map(({ name }) => name), ["An old one"]);
  assert.equal(storage.getItem("edgespec.conversation"), null);
  const conversation = library.open();
  assert.equal(library.list().length, 1);
  conversation.ask(`  ${"word ".repeat(20)}\nmore`, "a").answer.text = "Answered";
  conversation.save();
  assert.equal(conversation.name.length, 60);
  assert.deepEqual(library.list("answered WORD").map(({ id }) => id), [conversation.id]);
  assert.deepEqual(library.list("answered old"), []);
  library.open(conversation.id).rename("Mine");
  assert.deepEqual(library.list("mine").map(({ name }) => name), ["Mine"]);
  library.remove(conversation.id);
  assert.deepEqual(library.list().map(({ name }) => name), ["An old one"]);
});

test("a conversation is a file of the chat", () => {
  const conversation = new Library(new Storage()).open();
  conversation.ask("one", "a").answer.text = "1";
  conversation.ask("two", "b").answer.text = "2";
  const file = JSON.parse(toFile(conversation, "be brief"));
  assert.deepEqual([file.title, file.model, file.system, file.leaf], ["one", "b", "be brief", 4]);
  assert.deepEqual(file.turns.map(({ parent }) => parent), [null, 1, 2, 3]);
  if (process.env.EDGESPEC_EXPORT) writeFileSync(process.env.EDGESPEC_EXPORT, toFile(conversation, ""));
});

test("answers of the server", async () => {
  const messages = [{ role: "user", content: "x" }];
  const answer = await collect({ model: "tree", messages, max_tokens: 20, temperature: 0, logit_bias: { 256: -100 } });
  assert.ok(answer.text);
  assert.equal(answer.ending, "length");
  assert.match(answer.figures, /^20 tokens, [\d.]+ tok\/s/);
  await assert.rejects(collect({ model: "tree", messages, temperature: 9 }), { status: 400, message: /temperature: / });
});

test("an answer is stopped", async () => {
  const abort = new AbortController();
  const messages = [{ role: "user", content: "x" }];
  const body = { model: "tree", messages, max_tokens: 150_000, temperature: 0, logit_bias: { 256: -100 } };
  const chunks = streamChat(CALL, body, null, abort.signal);
  assert.ok((await chunks.next()).value.choices);
  abort.abort();
  await assert.rejects(async () => { for await (const chunk of chunks) assert.ok(chunk); }, { name: "AbortError" });
});

test("servers that break off or are not there", async () => {
  const endings = ["", 'data: {"choices": []}\n\n', 'data: {"error": {"message": "it broke."}}\n\n'];
  const server = createServer((_request, response) => response.end(endings.shift()));
  await new Promise((resolve) => { server.listen(0, "127.0.0.1", resolve); });
  const url = `http://127.0.0.1:${server.address().port}/`;
  const readAll = async () => { for await (const chunk of streamChat(url, {}, "key")) assert.deepEqual(chunk.choices, []); };
  await assert.rejects(readAll, { message: "The connection ended before the answer did." });
  await assert.rejects(readAll, { message: "The connection ended before the answer did." });
  await assert.rejects(readAll, { message: "it broke." });
  await new Promise((resolve) => { server.close(resolve); server.closeAllConnections(); });
  await assert.rejects(readAll, { message: "The server does not respond." });
});

test("tool calls arrive in pieces, and figures may be missing", () => {
  const { answer } = new Conversation(new Storage()).ask("x", "a");
  const parts = [{ name: "f", arguments: "" }, { arguments: '{"a":' }, { arguments: " 1}" }];
  for (const part of parts) addChunk(answer, { choices: [{ delta: { tool_calls: [{ index: 0, function: part }] } }] });
  assert.deepEqual(answer.calls, [{ name: "f", arguments: '{"a": 1}' }]);
  assert.equal(describeFigures({ predicted_n: 1, predicted_per_second: null, speedup: null, draft_n: 0 }), "1 token");
});
