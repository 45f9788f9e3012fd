// Timeline of a job: phases of every member per round, and a table of rounds.

import { element, pill, setText } from "../lib/dom.js";
import { bytes, clock, duration, few, NONE } from "../lib/format.js";
import { Gantt } from "./gantt.js";
import { Table } from "../lib/table.js";

const NUMBERS = [5, 10, 25, 50, 100, 250];
const PAUSE_S = 60;

export class TimelinePart {
  constructor(store, data) {
    this.store = store;
    this.data = data;
    this.number = 10;
    this.gantt = new Gantt();
    this.committed = element("span", { class: "quiet" });
    this.table = new Table({ label: "Rounds", columns: columns((member) => data.labelOf(member)), key: (row) => String(row.id), rowClass: ({ committed }) => (committed ? "" : "aborted") });
    this.table.element.classList.add("tall");
    this.element = element("div", { class: "stackview" },
      element("section", { class: "card", "aria-labelledby": "timeline-title" },
        element("div", { class: "head" }, element("h2", { id: "timeline-title" }, "Timeline"),
          element("span", { class: "quiet" }, "arrow keys move through the rounds, + and − zoom"),
          this.pause = element("span", { class: "quiet" }),
          element("span", { class: "space" }),
          element("label", { class: "filter" }, "last ", this.select = element("select", {
            id: "round-count", change: (event) => { this.number = Number(event.target.value); this.#draw(); },
          }, ...NUMBERS.map((n) => element("option", { value: n, selected: n === this.number && "" }, `${n} rounds`))))),
        this.gantt.element),
      element("section", { class: "card", "aria-labelledby": "rounds-title" },
        element("div", { class: "head" }, element("h2", { id: "rounds-title" }, "Rounds"), this.committed),
        this.table.element));
    this.gantt.onZoom = (step) => {
      const at = NUMBERS.indexOf(this.number) - step;
      if (!NUMBERS[at]) return;
      this.number = NUMBERS[at];
      this.select.value = String(this.number);
      this.#draw();
    };
  }

  update() {
    const { view } = this.data;
    this.committed.textContent = `${view.committed_round} committed, ${view.aborted_rounds} aborted`;
    if (!this.data.take("rounds")) return;
    this.table.show([...this.data.rounds].reverse().slice(0, 300));
    this.#draw();
  }

  #draw() {
    const rounds = this.data.rounds.slice(-this.number);
    const begin = afterPause(rounds);
    setText(this.pause, begin ? `without the ${begin} before a pause of ${duration(rounds[begin].time - rounds[begin - 1].time)}` : "");
    this.gantt.show(rounds.slice(begin), (member) => this.data.labelOf(member));
  }

  close() { this.gantt.close(); }
}

// The first round after a pause that would take more than half of the drawing; 0: there is none.
function afterPause(rounds) {
  const whole = rounds.length ? rounds.at(-1).time - rounds[0].time : 0;
  return Math.max(0, rounds.findLastIndex(({ time }, at) => at > 0 && time - rounds[at - 1].time > Math.max(whole / 2, PAUSE_S)));
}

// label: of a member, for people
const columns = (label) => [
  { name: "Round", align: "right first", value: (row) => row.round },
  { name: "Epoch", align: "right", value: (row) => row.epoch },
  { name: "Verdict", value: (row) => pill(row.committed ? "committed" : "aborted") },
  { name: "At", value: (row) => clock(row.time) },
  { name: "Exchange", align: "right", value: (row) => duration(row.seconds) },
  { name: "Sent by all", align: "right", hint: "Known once the members have joined the next round", value: (row) => (row.nbytes ? bytes(row.nbytes) : NONE) },
  { name: "Route", value: (row) => row.route },
  { name: "Slowest", value: (row) => slowest(row, label) },
  { name: "Members", align: "text", value: (row) => (row.committed ? members(row, label) : spoken(row.reason, label)) },
];

function members({ members: planned, contributors }, label) {
  const names = few(contributors.map(label));
  return contributors.length === planned.length ? names : `${names} (${contributors.length} of ${planned.length})`;
}

const spoken = (reason, label) => (reason ?? "").replace(/\bw\d+\b/g, label);

function slowest({ timeline }, label) {
  const reported = (timeline ?? []).filter((row) => row.compute_s != null);
  if (reported.length < 2) return "–";
  const worst = reported.reduce((a, b) => (b.compute_s > a.compute_s ? b : a));
  return `${label(worst.member)} ${duration(worst.compute_s)}`;
}
