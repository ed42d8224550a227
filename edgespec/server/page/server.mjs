// The state of the server: its models and recent answers, from /props.

import { make } from "./dom.mjs";
import { CallError, withKey } from "./stream.mjs";

/** The body of /props. Throws CallError. */
export async function readProps(key) {
  let response;
  try {
    response = await fetch("props", { headers: withKey(key) });
  } catch {
    throw new CallError("The server does not respond.");
  }
  if (response.status === 401) throw new CallError("This server requires an API key.", 401);
  if (!response.ok) throw new CallError(`The server answered ${response.status} ${response.statusText}.`);
  return response.json();
}

export function showTables(props, models, recent) {
  fill(models, props.models.map((model) => [
    model.name, describeState(model), model.backend ?? "", model.draft ?? "",
    model.context_size?.toLocaleString() ?? "", format(model.plain_tokens_per_second),
    model.resident_bytes ? `${(model.resident_bytes / 2 ** 20).toFixed(0)} MiB` : "", model.waiting,
  ]));
  fill(recent, props.recent.slice(0, 20).map((call) => [
    new Date(call.at * 1000).toLocaleTimeString(), call.model, call.prompt_tokens, call.tokens,
    format(call.tokens_per_second), format(call.speedup, 2),
    call.acceptance === null ? "-" : `${(call.acceptance * 100).toFixed(0)}%`, format(call.tau, 2),
    call.ttft === null ? "-" : `${(call.ttft * 1000).toFixed(0)} ms`, call.ending,
  ]));
}

function describeState(model) {
  if (model.is_stalled) return "stalled";
  if (model.answering) return `answering ${model.answering} of ${model.answers_at_once ?? 1}`;
  if (model.is_reachable === false) return "not reachable";
  if (model.last_error) return `fails: ${model.last_error}`;
  return model.state;
}

function format(value, digits = 1) {
  return value === null || value === undefined ? "-" : value.toFixed(digits);
}

function fill(table, rows) {
  const makeRow = (cells) => make("tr", {}, ...cells.map((text) => make("td", { textContent: text })));
  table.querySelector("tbody").replaceChildren(...rows.map(makeRow));
}
