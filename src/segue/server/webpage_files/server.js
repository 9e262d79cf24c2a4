// How the page talks to its server: addresses beside the page's own, the key, and server-sent events.

const base = new URL("..", import.meta.url); // this file is at page/server.js below the server's root
const STORED = "segue-key";

export const key = {
  get: () => sessionStorage.getItem(STORED) ?? "",
  set: (value) => (value ? sessionStorage.setItem(STORED, value) : sessionStorage.removeItem(STORED)),
};

/** An answer other than 200, with the server's own words. */
export class Refusal extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Sends a request with the key; throws a Refusal, or a TypeError if the server does not answer. */
export async function ask(path, { body, signal } = {}) {
  const headers = key.get() ? { Authorization: `Bearer ${key.get()}` } : {};
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const response = await fetch(new URL(path, base), {
    method: body === undefined ? "GET" : "POST",
    headers,
    body: body === undefined ? undefined : JSON.stringify(body),
    signal,
    cache: "no-store",
  });
  if (!response.ok) throw new Refusal(response.status, await reason(response));
  return response;
}

async function reason(response) {
  const text = await response.text();
  try {
    const found = JSON.parse(text);
    return found.error?.message ?? found.message ?? text;
  } catch {
    return text || `the server answered ${response.status}`;
  }
}

/** Yields the data of each event of a response, as text. */
export async function* events(response) {
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + decoder.decode(value, { stream: true })).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const lines = part.split("\n").filter((line) => line.startsWith("data:"));
        if (lines.length) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
