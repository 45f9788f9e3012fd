// How the page talks to the hub: questions, wishes, and the stream of ticks.

import { say } from "./dialog.js";

const SILENT_MS = 6000;
const HIDDEN_MS = 60000;

export const path = (...parts) => ["api", ...parts.map(encodeURIComponent)].join("/");

// GET; resolves to null where the hub has no answer: the view shows what it has.
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
export const post = (address, body, { done = "Done." } = {}) => send(address, done, {
  method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body),
});

// DELETE, in the same way.
export const remove = (address, { done = "Deleted." } = {}) => send(address, done, { method: "DELETE" });

async function send(address, done, wish) {
  let problem = "The hub does not answer.";
  try {
    const answer = await fetch(address, wish);
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
    this.wanted = null;
    setInterval(() => this.#watch(), 2000);
    document.addEventListener("visibilitychange", () => this.#look());
  }

  // Opens the stream, with what is new of one job; `points()` is the last point that is known.
  open(job = "", points = () => 0) {
    this.wanted = { job, points };
    this.#connect();
  }

  // A hidden page costs the hub nothing; it is complete again when it is shown.
  #look() {
    clearTimeout(this.sleep);
    if (!document.hidden) {
      if (this.wanted && !this.source) this.#connect();
      return;
    }
    this.sleep = setTimeout(() => {
      this.source?.close();
      this.source = null;
    }, HIDDEN_MS);
  }

  #connect() {
    this.source?.close();
    const { job, points } = this.wanted;
    const source = new EventSource(`api/stream?${new URLSearchParams(job ? { job, points: points() } : {})}`);
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
    if (this.source.readyState === EventSource.CLOSED) this.#again();
  }

  // Refused, not only cut: a login that has ended leads to the form, everything else is tried again.
  async #again() {
    try {
      const { status } = await fetch("api/hub");
      if (status === 401) { location.reload(); return; }
      if (this.source?.readyState === EventSource.CLOSED) this.#connect();
    } catch { /* the hub is away: the next look tries again */ }
  }
}
