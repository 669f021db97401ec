// Talking to the server that this page came from: its key, its errors in words, its streams of events.

const KEY = "key"; // as /docs has it: a key given there serves here
let held = ""; // where storage is forbidden

export const storedKey = () => {
  try { return sessionStorage.getItem(KEY) || ""; } catch { return held; }
};

export function storeKey(key) {
  held = key;
  try { key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY); } catch { /* held above */ }
}

export class Failure extends Error {
  constructor(message, { status = 0, retryAfter = null } = {}) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

// Fetches a path below the page's own; raises a Failure whose message a person can read.
export async function call(path, { body, signal } = {}) {
  const headers = {};
  const key = storedKey();
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {
      method: body === undefined ? "GET" : "POST",
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      cache: "no-store",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure("The server does not answer.");
  }
  if (response.ok) return response;
  throw await failureOf(response, key);
}

async function failureOf(response, key) {
  let said = "";
  try {
    said = (await response.json()).error.message;
  } catch {
    // Not ours: a proxy's, perhaps.
  }
  const { status } = response;
  const retryAfter = Number(response.headers.get("Retry-After")) || null;
  let message = said || `The server answered with status ${status}.`;
  if (status === 401) {
    document.dispatchEvent(new CustomEvent("keyneeded", { detail: { given: key } }));
    message = "The server asks for an API key.";
  } else if (status === 429) {
    const wait = retryAfter ? ` Try again in ${retryAfter} s.` : " Try again in a moment.";
    message = `The server has no room just now.${wait}`;
  }
  return new Failure(message, { status, retryAfter });
}

// Yields { name, data } for each event of a response's body.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        let name = "message";
        const data = [];
        for (const line of part.split("\n")) {
          if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
          else if (line.startsWith("event:")) name = line.slice(6).trim();
        }
        if (data.length) yield { name, data: data.join("\n") };
      }
    }
  } finally {
    // Also when the reader of the events leaves early: the connection is not to stay.
    reader.cancel().catch(() => {});
  }
}
