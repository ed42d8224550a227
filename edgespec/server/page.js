"use strict";
// The status page: polls /props once a second, and chats through /v1/chat/completions.

const get = (id) => document.getElementById(id);
const key = () => sessionStorage.getItem("key");
const headers = () => (key() ? { authorization: `Bearer ${key()}` } : {});
const number = (value, digits = 1) => (value === null || value === undefined ? "-" : value.toFixed(digits));

function fill(table, rows) {
  const body = table.querySelector("tbody");
  body.replaceChildren(...rows.map((cells) => {
    const row = document.createElement("tr");
    row.append(...cells.map((text) => Object.assign(document.createElement("td"), { textContent: text })));
    return row;
  }));
}

function tell(text, isError = false) {
  get("told").textContent = text;
  get("told").className = isError ? "error" : "";
}

function choices(models) {
  const select = get("chat").querySelector("select");
  const names = models.map((model) => model.name);
  if (names.join("\n") === [...select.options].map((option) => option.value).join("\n")) return;
  select.replaceChildren(...names.map((name) => new Option(name, name)));
}

async function refresh() {
  try {
    const response = await fetch("props", { headers: headers() });
    get("key").hidden = response.status !== 401;
    if (response.status === 401) return tell("This server requires an API key.");
    const props = await response.json();
    get("version").textContent = props.version;
    tell("");
    choices(props.models);
    fill(get("models"), props.models.map((m) => [m.name, m.answering ? `answering ${m.answering} of ${m.answers_at_once ?? 1}` : m.is_open ? "open" : "closed",
      m.backend ?? "", m.draft ?? "", m.context_size?.toLocaleString() ?? "", number(m.plain_tokens_per_second),
      m.resident_bytes ? `${(m.resident_bytes / 2 ** 20).toFixed(0)} MiB` : "", m.waiting]));
    fill(get("recent"), props.recent.slice(0, 20).map((c) => [new Date(c.at * 1000).toLocaleTimeString(), c.model,
      c.prompt_tokens, c.tokens, number(c.tokens_per_second),
      number(c.times_plain, 2),
      c.acceptance === null ? "-" : `${(c.acceptance * 100).toFixed(0)}%`, number(c.tau, 2),
      c.ttft === null ? "-" : `${(c.ttft * 1000).toFixed(0)} ms`, c.ending]));
  } catch (error) {
    tell("The server does not respond.", true);
  }
}

async function chat(event) {
  event.preventDefault();
  const form = get("chat");
  const abort = new AbortController();
  const stop = get("stop");
  const answer = get("answer");
  answer.textContent = "";
  get("figures").textContent = "";
  stop.disabled = false;
  stop.onclick = () => abort.abort();
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST",
      signal: abort.signal,
      headers: { "content-type": "application/json", ...headers() },
      body: JSON.stringify({ model: form.querySelector("select").value, stream: true, max_tokens: 512,
        messages: [{ role: "user", content: form.querySelector("textarea").value }] }),
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let held = "";
    for (let part = await reader.read(); !part.done; part = await reader.read()) {
      held += part.value;
      const events = held.split("\n\n");
      held = events.pop();
      for (const line of events.filter((each) => each.startsWith("data: {"))) {
        const data = JSON.parse(line.slice(6));
        if (data.error) throw new Error(data.error.message);
        const delta = data.choices[0]?.delta ?? {};
        answer.append(delta.reasoning_content ?? "", delta.content ?? "");
        if (data.timings) figures(data.timings);
      }
    }
  } catch (error) {
    if (error.name !== "AbortError") answer.append(error.message);
  } finally {
    stop.disabled = true;
  }
}

function figures(t) {
  const ratio = t.times_plain ? `, ${number(t.times_plain, 2)}x plain decoding` : "";
  get("figures").textContent = `${t.predicted_n} tokens, ${number(t.predicted_per_second)} tok/s${ratio}, ` +
    `${t.draft_n_accepted} of ${t.draft_n} drafted tokens accepted`;
}

get("key").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("key", get("key").querySelector("input").value);
  refresh();
});
get("chat").addEventListener("submit", chat);
get("chat").querySelector("textarea").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && event.ctrlKey) get("chat").requestSubmit();
});
refresh();
setInterval(refresh, 1000);
