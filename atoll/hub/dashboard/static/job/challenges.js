// Who was checked by computing a round again, when, and with what result; how each member's
// contributions look and what they gain. Of jobs with trust = "audit".

import { element, empty, pill, setText } from "../lib/dom.js";
import { NONE, count, moment, plural } from "../lib/format.js";
import { get, path } from "../lib/client.js";
import { Table } from "../lib/table.js";

const REFRESH_MS = 3000;
const LOOKS = { passed: "good", failed: "bad", "accused falsely": "warn", undecided: "warn", unchecked: "" };
const STAGES = {
  deposit: "waits for its state", replay: "is computed again", detail: "steps are compared",
  state: "waits for a state", judge: "is judged",
};

export class ChallengesPart {
  constructor(store, data) {
    this.data = data;
    this.members = new Table({
      label: "Members", key: (row) => row.name, sortBy: "Member", cards: true, columns: [
        { name: "Member", align: "first", value: (row) => row.name, sort: (row) => row.name },
        { name: "State", value: state, sort: (row) => 2 * row.evicted + Boolean(row.strikes.length) },
        { name: "Strikes", align: "right", value: (row) => `${row.strikes.length} of ${row.allowed}`, sort: (row) => row.strikes.length },
        { name: "Rounds", align: "right", value: (row) => count(row.rounds), sort: (row) => row.rounds },
        { name: "Checked", align: "right", value: (row) => count(row.checked), sort: (row) => row.checked },
        { name: "Passed", align: "right", value: (row) => count(row.passed), sort: (row) => row.passed },
        { name: "Accused falsely", align: "right", optional: true, hint: "Times it named other digests of another member's round than judges found", value: (row) => row.accused_falsely || NONE, sort: (row) => row.accused_falsely ?? 0 },
        figure("Size", "relative", "Length of its last contribution, by that of the middle member; 1 is usual"),
        figure("Direction", "along", "Cosine of its last contribution with those of the others: below 0 it points against them"),
        figure("Likeness", "alike", "Largest cosine with another contribution, or with its own before: 1 is a copy"),
        figure("Rating", "rating", "-1 to 1: how regularly its checked contributions gain more on its own data than on held-out data"),
        { name: "Last strike", align: "wrap", value: (row) => row.strikes.at(-1) ?? "" },
      ],
    });
    this.challenges = new Table({
      label: "Challenges", key: (row) => row.number, cards: true, columns: [
        { name: "Round", align: "first", value: (row) => `round ${count(row.round)}`, sort: (row) => row.round },
        { name: "When", value: (row) => (row.at ? moment(row.at) : NONE) },
        { name: "Member", value: (row) => row.member, sort: (row) => row.member },
        { name: "Drawn by", value: (row) => row.why },
        { name: "Result", value: (row) => (row.result ? pill(row.result, LOOKS[row.result]) : STAGES[row.stage] ?? row.stage) },
        { name: "Strike for", value: (row) => row.guilty || NONE },
        { name: "Checker", value: (row) => row.checker || NONE },
        { name: "Judge", value: (row) => row.judge || NONE },
        { name: "Own data", align: "right", hint: "Share of the loss on the member's own data that the contribution took away", value: (row) => gain(row, "own") },
        { name: "Held out", align: "right", hint: "The same on held-out data", value: (row) => gain(row, "held_out") },
        { name: "Reason", align: "wrap", value: (row) => row.reason ?? "" },
      ],
    });
    this.rule = element("p", { class: "quiet", id: "trust-rule" });
    this.none = empty("No member-round was drawn yet.");
    this.absent = empty('The rounds of this job are not verified; trust = "audit" in [job] does that.');
    this.absent.hidden = true;
    this.element = element("div", { class: "stackview" },
      section("trust-title", "Members", this.absent, this.rule, this.members.element),
      section("challenges-title", "Challenges, newest first", this.none, this.challenges.element));
    this.timer = setInterval(() => this.#load(), REFRESH_MS);
    this.#load();
  }

  async #load() {
    if (this.data.view && !this.data.view.verified) {
      this.absent.hidden = false;
      return;
    }
    const found = await get(path("jobs", this.data.name, "verification"));
    if (!found) return;
    const rows = [...found.open, ...found.settled];
    this.none.hidden = rows.length > 0;
    this.challenges.show(rows);
    const members = Object.entries(found.members).map(([name, one]) => ({
      name, rounds: 0, checked: 0, passed: 0, strikes: [], evicted: false, allowed: found.strikes_allowed, ...one,
    }));
    const norms = members.map(({ norm }) => norm).filter(Boolean).sort((a, b) => a - b);
    const middle = norms[Math.floor(norms.length / 2)];
    for (const row of members) row.relative = row.norm ? row.norm / middle : undefined;
    this.members.show(members);
    const checked = members.reduce((sum, row) => sum + row.checked, 0);
    setText(this.rule, `${(100 * found.share).toFixed(0)} % of all member-rounds are checked by chance, newcomers once, false accusers check on trial, `
      + `${plural(found.strikes_allowed, "strike")} evict · ${plural(checked, "member-round")} checked so far`);
  }

  update() {}

  close() { clearInterval(this.timer); }
}

function state(row) {
  if (row.evicted) return pill("evicted", "bad");
  if (row.strikes.length) return pill("watched", "warn");
  return row.checked ? pill("trusted", "good") : pill("not checked", "");
}

function figure(name, key, hint) {
  const known = (row) => row[key] ?? null;
  return { name, hint, align: "right", optional: true, sort: known, value: (row) => known(row)?.toFixed(2) ?? NONE };
}

function gain(row, key) {
  if (row.own == null && row.held_out == null) return NONE;
  return `${(100 * (row[key] ?? 0)).toFixed(1)} %`;
}

function section(id, title, ...children) {
  return element("section", { class: "card", "aria-labelledby": id }, element("h2", { id }, title), ...children);
}
