// Plan: what would be best for a job, or a job file, on the machines that are there, and why.

import { button, card, element, facts, fill, setText } from "../lib/dom.js";
import { bytes, count, duration, few, loss, NONE, plural, short } from "../lib/format.js";
import { path } from "../lib/client.js";
import { Table } from "../lib/table.js";

const FILE = ""; // in place of a job: a job file in the field below

export class PlanView {
  constructor(store, { parts: [job = FILE] }) {
    this.store = store;
    this.title = "Plan";
    this.chosen = job;
    this.jobs = element("select", { id: "plan-job", change: (event) => this.#choose(event.target.value) });
    this.file = element("textarea", {
      id: "plan-file", rows: "9", spellcheck: "false", "aria-label": "Job file",
      placeholder: "[job]\nname = \"mine\"\n\n[model]\n...\n\n[train]\nsteps = 10000",
    });
    this.ask = button("Plan", () => this.#plan(), { id: "plan-ask", class: "main" });
    this.state = element("p", { class: "quiet", id: "plan-state", role: "status" });
    this.problem = element("p", { class: "reason bad", id: "plan-problem", hidden: "" });
    this.offline = element("p", { class: "empty", id: "plan-offline", hidden: "" }, "No machine is online, so there is nothing to plan for. Add one with the button above, or ", element("code", null, "atoll join"), " on it; for machines that you do not have yet: ", element("code", null, "atoll plan job.toml --machines fleet.toml"));
    this.table = new Table({
      label: "Methods", columns: COLUMNS, key: ({ preset }) => preset, cards: true,
      rowClass: (row) => (row === this.found?.candidates[0] ? "best" : ""),
    });
    this.answer = element("div", { class: "stackview", id: "plan-answer", hidden: "" },
      card("The choice", this.choice = element("div", { class: "stackview" })),
      card("The best of each method", this.note = element("p", { class: "quiet" }), this.table.element));
    this.element = element("div", { class: "view" },
      element("section", { class: "card", "aria-labelledby": "plan-title" },
        element("div", { class: "head" }, element("h2", { id: "plan-title" }, "Plan"), element("span", { class: "space" }),
          element("label", { class: "filter" }, "for ", this.jobs), this.ask),
        element("p", { class: "quiet" }, "Predicts methods, intervals, codecs, routes and members on the machines that are online. Nothing is started."),
        this.file, this.offline, this.problem, this.state),
      this.answer);
  }

  update() {
    const jobs = this.store.jobList();
    const signature = [this.store.operator, ...jobs.map(({ job }) => job)].join("\n");
    if (signature !== this.signature) {
      this.signature = signature;
      if (this.chosen && !jobs.some(({ job }) => job === this.chosen)) this.chosen = FILE;
      this.jobs.replaceChildren(...[...(this.store.operator ? [[FILE, "a job file"]] : []), ...jobs.map(({ job }) => [job, job])]
        .map(([value, text]) => element("option", { value, selected: value === this.chosen && "" }, text)));
      this.#choose(this.jobs.value);
    }
    const there = this.store.nodeList().filter(({ state }) => state === "online").length;
    this.offline.hidden = there > 0;
    this.ask.disabled = Boolean(this.asking) || !there || !(this.chosen || this.store.operator);
  }

  #choose(job) {
    this.chosen = job;
    this.file.hidden = job !== FILE || !this.store.operator;
    history.replaceState(null, "", job ? `#/plan/${encodeURIComponent(job)}` : "#/plan");
  }

  async #plan() {
    const since = performance.now();
    const said = () => setText(this.state, `planning for ${duration(Math.floor((performance.now() - since) / 1000))}; a plan takes some seconds`);
    this.asking = setInterval(said, 1000);
    this.ask.disabled = true;
    this.problem.hidden = true;
    said();
    const options = this.chosen ? {} : { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify({ spec: this.file.value }) };
    let reply = { error: { what: "The hub does not answer." } };
    try {
      reply = await (await fetch(this.chosen ? path("jobs", this.chosen, "plan") : "api/plan", options)).json();
    } catch { /* said below */ }
    clearInterval(this.asking);
    this.asking = null;
    this.found = reply.error ? null : reply;
    this.answer.hidden = Boolean(reply.error);
    this.problem.hidden = !reply.error;
    setText(this.state, "");
    if (reply.error) {
      const { what, given, expected, remedy } = reply.error;
      setText(this.problem, [what, given, expected && `expected: ${expected}`, remedy].filter(Boolean).join(" · "));
    } else this.#show(reply);
    this.update();
  }

  #show(found) {
    const { best } = found;
    const alone = best.members.length === 1;
    fill(this.choice,
      element("p", { class: "sentence", id: "plan-choice" }, alone
        ? `${best.members[0]} alone`
        : `${best.preset} on ${plural(best.members.length, "machine")}: ${few(best.members)}`),
      facts([
        ["Step", `${seconds(best.step_s)} (${seconds(best.step_low_s)} to ${seconds(best.step_high_s)})`],
        ["In all", duration(3600 * best.hours)],
        ["Against one machine", alone ? "it is one" : `${best.of_alone.toFixed(2)} times as fast as ${found.alone.members[0]} (${best.of_alone_low.toFixed(2)} to ${best.of_alone_high.toFixed(2)})`],
        ["Loss", best.loss ? `${loss(best.loss.loss)} at the end (${loss(best.loss.low)} to ${loss(best.loss.high)})` : "not predicted: the hub has no scaling law of this model (scaling.json of atoll scaling fit, in its data folder)"],
        best.price ? ["Price", `${short(best.price_per_hour)} an hour, ${short(best.price)} in all`] : null,
      ]),
      element("h3", null, "Why"),
      element("ul", { class: "why", id: "plan-why" }, ...[...found.reasons, ...found.notes, ...best.grounds, ...found.left_out.map((line) => `left out: ${line}`)].map((line) => element("li", null, line))),
      alone ? null : element("h3", null, "For the job file"),
      alone ? null : element("pre", { class: "output short", id: "plan-toml", tabindex: "0", "aria-label": "Lines for the job file" }, found.toml));
    const others = found.considered - found.candidates.length;
    setText(this.note, `${found.model}, ${count(found.parameters)} parameters, ${plural(found.machines, "machine")}. ${others > 0 ? `${plural(others, "other candidate")} considered.` : ""}`);
    this.table.show(found.candidates);
  }

  close() { clearInterval(this.asking); }
}

const seconds = (value) => (value < 1 ? `${short(1000 * value)} ms` : `${short(value)} s`);

const single = ({ members }) => members.length === 1;

const COLUMNS = [
  { name: "Method", align: "first", value: ({ preset }) => preset },
  { name: "Every", align: "right", value: (row) => (single(row) ? NONE : row.options.every ?? 1) },
  { name: "Delay", align: "right", value: (row) => row.options.delay ?? NONE },
  { name: "Codec", align: "wrap", value: (row) => (single(row) ? NONE : row.codec) },
  { name: "Route", align: "wrap", value: (row) => (single(row) ? NONE : [row.route, row.collective === "auto" ? "" : row.collective].filter(Boolean).join(" ")) },
  { name: "Members", align: "right", value: ({ members }) => element("span", { title: few(members, 20) }, members.length) },
  { name: "Step", align: "right", value: ({ step_s: step }) => seconds(step), sort: ({ step_s: step }) => step },
  { name: "Waits", align: "right", value: (row) => `${Math.round((100 * row.waiting_s) / row.step_s)} %`, sort: (row) => row.waiting_s / row.step_s },
  { name: "Sent a step", align: "right", value: (row) => (row.sent_bytes ? bytes(row.sent_bytes) : NONE), sort: (row) => row.sent_bytes },
  { name: "Progress", hint: "against one machine, and between which values it is", align: "right", value: (row) => (single(row) ? "1" : `${row.of_alone.toFixed(2)} (${row.of_alone_low.toFixed(2)} to ${row.of_alone_high.toFixed(2)})`), sort: (row) => row.of_alone },
  { name: "Loss", align: "right", optional: true, value: (row) => (row.loss ? loss(row.loss.loss) : NONE), sort: (row) => row.loss?.loss ?? null },
  { name: "In all", align: "right", value: ({ hours }) => duration(3600 * hours), sort: ({ hours }) => hours },
];
