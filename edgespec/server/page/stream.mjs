// Streams of /v1/chat/completions.

/** An answer that failed, with the server's sentence. `status`: of HTTP, or undefined in the middle of a stream. */
export class CallError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** The headers of a call with an API key, or with none. */
export const withKey = (key) => (key ? { authorization: `Bearer ${key}` } : {});

/** The chunks of an answer. Throws CallError, or AbortError after `signal`. */
export async function* streamChat(url, body, key, signal) {
  const response = await call(url, {
    method: "POST",
    signal,
    headers: { "content-type": "application/json", ...withKey(key) },
    body: JSON.stringify({ ...body, stream: true }),
  });
  if (!response.ok) throw new CallError(await readMessage(response), response.status);
  let isDone = false;
  for await (const data of readEvents(response.body, signal)) {
    isDone = data === "[DONE]";
    if (isDone) continue;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new CallError(chunk.error.message);
    yield chunk;
  }
  if (!isDone) throw new CallError("The connection ended before the answer did.");
}

async function call(url, options) {
  try {
    return await fetch(url, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new CallError("The server does not respond.");
  }
}

async function readMessage(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answered ${response.status} ${response.statusText}.`;
  }
}

/** The data of server-sent events. Comments are left out. */
async function* readEvents(stream, signal) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const part = await read(reader, signal);
    if (part.done) return;
    const lines = (held + part.value).split("\n");
    held = lines.pop();
    for (const line of lines) if (line.startsWith("data: ")) yield line.slice(6);
  }
}

async function read(reader, signal) {
  try {
    return await reader.read();
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new CallError("The connection ended before the answer did.");
  }
}
