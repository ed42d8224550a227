// The fields of the page that a reload keeps.

const KEY = "edgespec.fields";
const KEPT = ["model", "system", "temperature", "max-tokens", "message"]; // their ids
const get = (id) => document.getElementById(id);

export function keepFields() {
  if (!get("model").value) return; // the models are not known yet
  const values = Object.fromEntries(KEPT.map((id) => [id, get(id).value]));
  try {
    localStorage.setItem(KEY, JSON.stringify(values));
  } catch {
    // the storage is full, which the conversation tells
  }
}

export function readFields() {
  try {
    return JSON.parse(localStorage.getItem(KEY)) ?? {};
  } catch {
    return {};
  }
}

export function restoreFields() {
  for (const [id, value] of Object.entries(readFields())) if (KEPT.includes(id)) get(id).value = value;
}
