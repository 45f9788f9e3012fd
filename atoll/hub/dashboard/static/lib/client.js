// Communication with the hub: requests, and the stream of ticks.

import { say } from "./dialog.js";

const SILENT_MS = 6000;
const HIDDEN_MS = 60000;

export const path = (...parts) => ["api", ...parts.map(encodeURIComponent)].join("/");

// GET; resolves to null on failure, so that the view keeps what it has.
export async function get(address, query = {}) {
  const params = new URLSearchParams(Object.entries(query).filter(([, value]) => value !== ""));
  const text = params.toString();
  try {
    const answer = await fetch(text ? `${address}?${text}` : address);
    return answer.ok ? await answer.json() : null;
  } catch {
    return null;
  }
}

// POST; shows the outcome and resolves to whether it succeeded.
export const post = (address, body, { done = "Done." } = {}) => send(address, done, {
  method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body),
});

// DELETE, in the same way.
export const remove = (address, { done = "Deleted." } = {}) => send(address, done, { method: "DELETE" });

async function send(address, done, options) {
  let problem = "The hub does not answer.";
  try {
    const answer = await fetch(address, options);
    if (answer.ok) { say(done, "good"); return true; }
    const { error } = await answer.json();
    problem = [error.what, error.given, error.remedy].filter(Boolean).join(" · ");
  } catch { /* reported below */ }
  say(problem, "bad");
  return false;
}

export class Stream {
  constructor({ onTick, onState }) {
    this.onTick = onTick;
    this.onState = onState;
    this.received = 0;
    this.source = null;
    this.wanted = null;
    setInterval(() => this.#watch(), 2000);
    document.addEventListener("visibilitychange", () => this.#look());
  }

  // Opens the stream with details of one job; `known()` is what the page has of it and of the hub.
  open(job = "", known = () => ({})) {
    this.wanted = { job, known };
    this.#connect();
  }

  // A hidden page closes the stream to save work on the hub, and catches up when shown.
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
    const { job, known } = this.wanted;
    const source = new EventSource(`api/stream?${new URLSearchParams({ ...(job ? { job } : {}), ...known() })}`);
    source.onmessage = (message) => {
      if (source !== this.source) return;
      this.received = performance.now();
      this.onState("live");
      this.onTick(JSON.parse(message.data));
    };
    source.onerror = () => { if (source === this.source) this.onState("reconnecting"); };
    this.source = source;
  }

  #watch() {
    if (!this.source) return;
    if (performance.now() - this.received > SILENT_MS) this.onState("reconnecting");
    if (this.source.readyState === EventSource.CLOSED) this.#again();
  }

  // After an expired login show the form; retry after every other failure.
  async #again() {
    try {
      const { status } = await fetch("api/hub");
      if (status === 401) { location.reload(); return; }
      if (this.source?.readyState === EventSource.CLOSED) this.#connect();
    } catch { /* hub unavailable: retried later */ }
  }
}
