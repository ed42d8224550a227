import assert from "node:assert/strict";
import { createServer } from "node:http";
import { test } from "node:test";

import { Conversation, KEY, addChunk, describeFigures } from "../../../edgespec/server/page/conversation.mjs";
import { streamChat } from "../../../edgespec/server/page/stream.mjs";

const CALL = `${process.env.EDGESPEC_URL}/v1/chat/completions`;

class Storage extends Map {
  getItem(key) { return this.get(key) ?? null; }
  setItem(key, value) { if (value.length > 500) throw new Error("full"); this.set(key, value); }
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
  conversation.ask("three", "a");
  const expected = ["one", "1", "three"];
  assert.deepEqual(conversation.messages("").map(({ content }) => content), expected);
  assert.deepEqual(conversation.messages("be brief")[0], { role: "system", content: "be brief" });
  assert.ok(conversation.save());
  const again = new Conversation(storage);
  assert.deepEqual(again.turns, conversation.turns);
  again.ask("x".repeat(1000), "a");
  assert.ok(!again.save());
  again.clear();
  assert.deepEqual(new Conversation(storage).turns, []);
  for (const text of ["{", "{}", "[1]", "[null]", '[{"question": "x"}]']) {
    const { turns } = new Conversation(new Storage([[KEY, text]]));
    assert.ok(turns.every(({ question, answer }) => typeof question === "string" && answer.text === ""), text);
  }
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
