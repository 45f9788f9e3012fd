// Queues and topics: fill, age and rates; dead letters of one queue.

import { letter } from "../lib/actions.js";
import { button, element, empty, link, setText } from "../lib/dom.js";
import { bytes, count, duration, NONE } from "../lib/format.js";
import { get } from "../lib/client.js";
import { Table } from "../lib/table.js";

const REFRESH_MS = 3000;
const SHOWN_PAYLOAD = 300;

export class QueuesView {
  constructor(store, { parts: [queue = ""] }) {
    this.store = store;
    this.queue = queue;
    this.title = queue || "Queues";
    this.table = new Table({ label: "Queues", columns: QUEUE_COLUMNS, key: (row) => row.queue, cards: true, sortBy: "Queue", rowClass: (row) => (row.queue === this.queue ? "chosen" : "") });
    this.topics = new Table({ label: "Topics", columns: TOPIC_COLUMNS, key: (row) => row.queue, cards: true, sortBy: "Topic" });
    this.none = empty("All queues are empty. From any program or terminal:", "atoll queue put NAME VALUE");
    this.own = element("input", { type: "checkbox", id: "own-queues", change: () => this.update() });
    this.wantOwn = element("label", { class: "filter", hidden: "" }, this.own, " include commands to nodes");
    this.topicsCard = element("section", { class: "card", "aria-labelledby": "topics-title", hidden: "" },
      element("h2", { id: "topics-title" }, "Topics"), this.topics.element);
    this.letters = new Table({ label: "Dead letters", columns: this.#letterColumns(), key: (row) => String(row.seq), cards: true });
    this.noLetter = empty("No dead letter.");
    this.lettersTitle = element("h2", { id: "letters-title" });
    this.lettersCard = element("section", { class: "card", "aria-labelledby": "letters-title", hidden: "" },
      element("div", { class: "head" }, this.lettersTitle, element("span", { class: "space" }), link("#/queues", "close", { class: "quiet" })),
      element("p", { class: "quiet" }, "Items that were released too often, or could not be delivered. They stay here until they are requeued."),
      this.noLetter, this.letters.element);
    this.element = element("div", { class: "view" },
      element("section", { class: "card", "aria-labelledby": "queues-title" },
        element("div", { class: "head" }, element("h2", { id: "queues-title" }, "Queues"),
          element("span", { class: "space" }), this.wantOwn),
        this.none, this.table.element),
      this.topicsCard, this.lettersCard);
    this.timer = setInterval(() => this.#load(), REFRESH_MS);
    this.#load();
  }

  go({ parts: [queue = ""] }) {
    this.queue = queue;
    this.title = queue || "Queues";
    for (const { line } of this.table.rows.values()) line.classList.remove("chosen");
    this.#load();
    this.update();
    return true;
  }

  update() {
    const rows = this.store.queues;
    const all = rows.filter(({ kind }) => kind !== "topic");
    const isOwn = ({ queue, dead }) => queue.startsWith("node/") && !dead;
    this.wantOwn.hidden = !all.some(isOwn);
    const queues = this.own.checked ? all : all.filter((row) => !isOwn(row));
    const topics = rows.filter(({ kind }) => kind === "topic");
    this.none.hidden = queues.length > 0;
    this.table.element.hidden = queues.length === 0;
    this.table.show(queues);
    this.topicsCard.hidden = topics.length === 0;
    this.topics.show(topics);
    this.lettersCard.hidden = !this.queue;
    setText(this.lettersTitle, `Dead letters of ${this.queue}`);
  }

  async #load() {
    if (!this.queue) return;
    const wanted = this.queue;
    const found = await get("api/queues/dead", { queue: wanted });
    if (wanted !== this.queue) return;
    const letters = found ?? [];
    this.noLetter.hidden = letters.length > 0;
    this.letters.element.hidden = letters.length === 0;
    this.letters.show(letters);
  }

  async #act(verb, seq) {
    if (await letter(verb, this.queue, seq)) this.#load();
  }

  #letterColumns() {
    const columns = [
      { name: "Item", align: "first right", value: (row) => row.seq, sort: (row) => row.seq },
      { name: "Key", align: "wrap", value: (row) => row.key },
      { name: "Tries", align: "right", value: (row) => row.attempts, sort: (row) => row.attempts },
      { name: "Reason", align: "text", value: (row) => row.reason || NONE },
      { name: "Payload", align: "text", value: (row) => payload(row.payload) },
    ];
    const acts = {
      name: "Act", value: ({ seq }) => (this.store.operator ? element("span", { class: "actions" },
        button("Requeue", () => this.#act("requeue", seq)),
        button("Discard", () => this.#act("discard", seq), { class: "danger" })) : ""),
    };
    return [...columns, acts];
  }

  close() { clearInterval(this.timer); }
}

// The payload as text if it is text, otherwise its size.
function payload(base64) {
  if (!base64) return NONE;
  try {
    const raw = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
    const text = new TextDecoder("utf-8", { fatal: true }).decode(raw);
    if (!/[\0-\x08]/.test(text)) return element("code", null, text.length > SHOWN_PAYLOAD ? `${text.slice(0, SHOWN_PAYLOAD)}…` : text);
    return bytes(raw.length);
  } catch {
    return `${bytes(Math.floor(base64.length * 0.75))}, not text`;
  }
}

const speed = (value) => (value == null ? NONE : `${count(value)}/s`);

const QUEUE_COLUMNS = [
  { name: "Queue", align: "first wrap", value: ({ queue }) => link(`#/queues/${encodeURIComponent(queue)}`, queue), sort: ({ queue }) => queue },
  { name: "Ready", align: "right", value: (row) => count(row.ready), sort: (row) => row.ready },
  { name: "Leased", align: "right", value: (row) => count(row.leased), sort: (row) => row.leased },
  { name: "Dead", align: "right", value: (row) => (row.dead ? element("span", { class: "bad" }, row.dead) : "0"), sort: (row) => row.dead },
  { name: "Oldest", align: "right", value: (row) => (row.oldest_s ? duration(row.oldest_s) : NONE), sort: (row) => row.oldest_s },
  { name: "In", align: "right", value: (row) => speed(row.in_per_s), sort: (row) => row.in_per_s },
  { name: "Out", align: "right", value: (row) => speed(row.out_per_s), sort: (row) => row.out_per_s },
  { name: "Size", align: "right", value: (row) => bytes(row.bytes), sort: (row) => row.bytes },
  { name: "Bound", value: bound },
  { name: "Waiting", align: "right", value: (row) => (row.waiting_producers ? `${row.waiting_producers} producers` : NONE), sort: (row) => row.waiting_producers },
];

const TOPIC_COLUMNS = [
  { name: "Topic", align: "first wrap", value: ({ queue }) => queue, sort: ({ queue }) => queue },
  { name: "Subscribers", align: "right", value: (row) => count(row.subscribers), sort: (row) => row.subscribers },
  { name: "Kept", align: "right", value: (row) => count(row.ready), sort: (row) => row.ready },
  { name: "In", align: "right", value: (row) => speed(row.in_per_s), sort: (row) => row.in_per_s },
  { name: "Out", align: "right", value: (row) => speed(row.out_per_s), sort: (row) => row.out_per_s },
  { name: "Size", align: "right", value: (row) => bytes(row.bytes), sort: (row) => row.bytes },
  { name: "Bound", value: bound },
];

function bound({ max_items: items, max_bytes: size, overflow }) {
  const limits = [items ? `${count(items)} items` : "", size ? bytes(size) : ""].filter(Boolean);
  return limits.length ? `${limits.join(", ")}, then ${overflow}` : "none";
}
