// How the page talks to the hub: questions, wishes, and the stream of ticks.

import { say } from "./dialog.js";

const SILENT_MS = 6000;

export const path = (...parts) => ["api", ...parts.map(encodeURIComponent)].join("/");

// GET; resolves to null where the hub has no answer (and says why in the console of nobody).
export async function get(address, query = {}) {
  const asked = new URLSearchParams(Object.entries(query).filter(([, value]) => value !== ""));
  const text = asked.toString();
  try {
    const answer = await fetch(text ? `${address}?${text}` : address);
    return answer.ok ? await answer.json() : null;
  } catch {
    return null;
  }
}

// POST; says how it went, resolves to whether it went well.
export async function post(address, body, { done = "Done." } = {}) {
  let problem = "The hub does not answer.";
  try {
    const answer = await fetch(address, {
      method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body),
    });
    if (answer.ok) { say(done, "good"); return true; }
    const { error } = await answer.json();
    problem = [error.what, error.given, error.remedy].filter(Boolean).join(" · ");
  } catch { /* said below */ }
  say(problem, "bad");
  return false;
}

export class Stream {
  constructor({ onTick, onState }) {
    this.onTick = onTick;
    this.onState = onState;
    this.heard = 0;
    this.source = null;
    this.address = null;
    setInterval(() => this.#watch(), 2000);
  }

  // Opens the stream, with what is new of one job; `points` is the last point that is known.
  open(job = "", points = 0) {
    const query = new URLSearchParams(job ? { job, points } : {});
    this.address = `api/stream?${query}`;
    this.#connect();
  }

  close() {
    this.source?.close();
    this.source = null;
  }

  #connect() {
    this.source?.close();
    const source = new EventSource(this.address);
    source.onmessage = (message) => {
      if (source !== this.source) return;
      this.heard = performance.now();
      this.onState("live");
      this.onTick(JSON.parse(message.data));
    };
    source.onerror = () => { if (source === this.source) this.onState("reconnecting"); };
    this.source = source;
  }

  #watch() {
    if (!this.source) return;
    if (performance.now() - this.heard > SILENT_MS) this.onState("reconnecting");
    if (this.source.readyState === EventSource.CLOSED) this.#connect();
  }
}
