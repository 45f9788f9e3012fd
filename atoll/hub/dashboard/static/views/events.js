// Events: alarms with cause and remedy, events, limits, and (for operators) the audit log.

import { silence } from "../lib/actions.js";
import { button, element, empty, fill, link, pill, setText } from "../lib/dom.js";
import { eventLine } from "../lib/event_line.js";
import { duration, moment, NONE } from "../lib/format.js";
import { get } from "../lib/client.js";
import { Table } from "../lib/table.js";
import { LimitsCard } from "./limits.js";

const PARTS = [["alarms", "Alarms"], ["happened", "Activity"], ["limits", "Limits"], ["audit", "Audit log"]];
const REFRESH_MS = 5000;
const SHOWN = 300;

export class EventsView {
  constructor(store, { parts: [part = "alarms"] }) {
    this.store = store;
    this.title = "Activity";
    this.filter = "";
    this.tabs = element("nav", { class: "tabs", "aria-label": "Parts of the events" },
      ...PARTS.map(([name, text]) => link(`#/events/${name}`, text, { "data-part": name })));
    this.open = new Table({ label: "Open alarms", columns: this.#alarmColumns(true), key: (row) => String(row.id), cards: true, rowClass: ({ severity }) => severity });
    this.ended = new Table({ label: "Ended alarms", columns: this.#alarmColumns(false), key: (row) => String(row.id), cards: true });
    this.audit = new Table({ label: "Audit log", columns: AUDIT, key: (row) => JSON.stringify(row), cards: true });
    this.list = element("ol", { class: "events long", tabindex: "0", "aria-label": "Events of the hub, its nodes and jobs" });
    this.calm = empty("All clear: no open alarms.");
    this.noneEnded = empty("None has ended yet.");
    this.limits = new LimitsCard();
    this.noAudit = empty("Nothing yet.");
    this.search = element("input", { id: "event-search", type: "search", placeholder: "Search events", "data-search": "", input: (event) => { this.filter = event.target.value.toLowerCase(); this.seen = -1; this.update(); } });
    this.sections = {
      alarms: element("div", { class: "stackview" },
        section("open-title", "Open alarms", this.calm, this.open.element),
        section("ended-title", "Ended alarms", this.noneEnded, this.ended.element)),
      happened: element("section", { class: "card", "aria-labelledby": "happened-title" },
        element("div", { class: "head" }, element("h2", { id: "happened-title" }, "Activity"), element("span", { class: "space" }),
          element("label", { class: "filter" }, element("span", { class: "hidden" }, "Search events"), this.search)),
        this.list),
      limits: this.limits.element,
      audit: section("audit-title", "Audit log", this.noAudit, this.audit.element),
    };
    this.place = element("div", { class: "part" });
    this.element = element("div", { class: "view" }, this.tabs, this.place);
    this.timer = setInterval(() => this.#load(), REFRESH_MS);
    this.#show(part);
  }

  go({ parts: [part = "alarms"] }) {
    this.#show(part);
    this.update();
    return true;
  }

  #show(wanted) {
    this.part = this.sections[wanted] ? wanted : "alarms";
    for (const tab of this.tabs.children) {
      if (tab.dataset.part === this.part) tab.setAttribute("aria-current", "page");
      else tab.removeAttribute("aria-current");
    }
    this.place.replaceChildren(this.sections[this.part]);
    this.#load();
  }

  update() {
    const audit = this.tabs.querySelector("[data-part=audit]");
    audit.hidden = !this.store.operator;
    const alarms = this.store.alarms;
    setText(this.tabs.firstChild, alarms.length ? `Alarms (${alarms.length})` : "Alarms");
    this.calm.hidden = alarms.length > 0;
    this.open.element.hidden = alarms.length === 0;
    this.open.show([...alarms].sort((a, b) => (a.severity === b.severity ? b.since - a.since : a.severity === "critical" ? -1 : 1)));
    const last = this.store.events.at(-1)?.id ?? 0;
    if (this.part === "happened" && last !== this.seen) {
      this.seen = last;
      const wanted = this.store.events.filter(({ job, kind, text }) => !this.filter || `${job} ${kind} ${text}`.toLowerCase().includes(this.filter));
      fill(this.list, ...wanted.slice(-SHOWN).reverse().map((event) => eventLine(event, { named: true })));
      if (!wanted.length) fill(this.list, element("li", null, empty("Nothing.")));
    }
  }

  async #load() {
    if (this.part === "alarms") {
      const found = await get("api/alarms", { all: 1 });
      const ended = (found ?? []).filter((alarm) => alarm.ended);
      this.noneEnded.hidden = ended.length > 0;
      this.ended.element.hidden = ended.length === 0;
      this.ended.show(ended.sort((a, b) => b.ended - a.ended).slice(0, 200));
    } else if (this.part === "limits") {
      await this.limits.load();
    } else if (this.part === "audit" && this.store.operator) {
      const found = await get("api/audit");
      const rows = (Array.isArray(found) ? found : found?.entries ?? found?.audit ?? []);
      this.noAudit.hidden = rows.length > 0;
      this.audit.element.hidden = rows.length === 0;
      this.audit.show(grouped([...rows].sort((a, b) => b.time - a.time)).slice(0, 500));
    }
  }

  #alarmColumns(open) {
    const columns = [
      { name: "Severity", value: ({ severity }) => pill(severity), sort: ({ severity }) => severity },
      { name: "Kind", align: "first", value: ({ kind }) => kind.replaceAll("-", " "), sort: ({ kind }) => kind },
      { name: "Cause", align: "text", value: (alarm) => this.#linked(alarm.cause, alarm) },
      { name: "Remedy", align: "text", value: (alarm) => this.#linked(alarm.remedy, alarm) },
      { name: "Machine", value: ({ node }) => (node ? link(`#/fleet/${encodeURIComponent(node)}`, node) : NONE), sort: ({ node }) => node },
      { name: "Job", value: ({ job }) => (job ? link(`#/jobs/${encodeURIComponent(job)}`, job) : NONE), sort: ({ job }) => job },
      { name: "Since", value: ({ since }) => moment(since), sort: ({ since }) => since },
    ];
    if (!open) {
      return [...columns, { name: "Lasted", align: "right", value: ({ since, ended }) => duration(ended - since) }];
    }
    return [...columns,
      { name: "For", align: "right", live: true, value: ({ since }) => duration(Math.max(0, Math.floor(this.store.time - since))) },
      { name: "Action", value: (alarm) => this.#act(alarm) }];
  }

  // Commands as such, jobs and machines as links, members by their machine.
  #linked(text, { job, node }) {
    const places = [[job, "jobs"], [node, "fleet"]].filter(([name, place]) => name && (place === "jobs" || this.store.nodes.has(name)));
    let parts = [text ?? ""];
    for (const [name, place] of places) {
      parts = parts.flatMap((part) => (typeof part !== "string" ? [part]
        : part.split(new RegExp(`(?<![\\w-])(${name.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")})(?![\\w-])`))
          .map((piece) => (piece === name ? link(`#/${place}/${encodeURIComponent(name)}`, name) : piece))));
    }
    return element("span", null, ...parts);
  }

  #act(alarm) {
    if (alarm.silenced) return pill("silenced");
    return this.store.operator ? button("Silence", () => silence(alarm)) : "";
  }

  close() { clearInterval(this.timer); }
}

// Repetitions of one sentence in a row become one row.
function grouped(rows) {
  const found = [];
  for (const row of rows) {
    const last = found.at(-1);
    if (last && last.text === row.text && last.address === row.address) last.times += 1;
    else found.push({ ...row, times: 1 });
  }
  return found;
}

function section(id, title, ...children) {
  return element("section", { class: "card", "aria-labelledby": id }, element("h2", { id }, title), ...children);
}

const AUDIT = [
  { name: "What happened", align: "first wrap", value: (row) => element("span", { class: /^[45]|[a-z]/.test(row.outcome) ? "bad" : null, title: `${row.action}: ${row.target}: ${row.outcome}` }, row.text, row.times > 1 ? ` (${row.times} times)` : "") },
  { name: "Time", value: (row) => moment(row.time), sort: (row) => row.time },
  { name: "From", value: (row) => row.address ?? NONE, sort: (row) => row.address },
];
