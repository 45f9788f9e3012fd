// Jobs, filtered by state, batch and text.

import { erase } from "../lib/actions.js";
import { bar, button, element, empty, link, pill, setText } from "../lib/dom.js";
import { count, duration, loss, moment, NONE } from "../lib/format.js";
import { jobState, problem } from "../lib/store.js";
import { Table } from "../lib/table.js";

const STATES = ["all", "running", "waiting", "paused", "done", "failed", "stopped"];

export class JobsView {
  constructor(store) {
    this.store = store;
    this.title = "Jobs";
    this.wanted = { state: "all", batch: "", text: "" };
    this.chosen = new Set();
    this.total = element("span", { class: "quiet" });
    this.batches = element("select", {
      id: "job-batch", change: (event) => this.#want("batch", event.target.value),
    }, element("option", { value: "" }, "all batches"));
    this.batchLabel = element("label", { class: "filter", hidden: "" }, element("span", { class: "hidden" }, "Batch"), this.batches);
    this.compare = element("a", { class: "button", hidden: "" }, "Compare");
    this.delete = button("Delete", () => this.#erase(), { class: "danger", hidden: "" });
    this.table = new Table({
      label: "Jobs", columns: this.#columns(), key: (row) => row.job, cards: true,
      rowClass: (row) => jobState(row),
    });
    this.none = empty("No job yet. Start one with", "atoll run job.toml");
    this.element = element("div", { class: "view" }, element("section", { class: "card", "aria-labelledby": "jobs-title" },
      element("div", { class: "head" },
        element("h2", { id: "jobs-title" }, "Jobs"), this.total, element("span", { class: "space" }), this.compare, this.delete,
        element("label", { class: "filter" }, element("span", { class: "hidden" }, "State of jobs"),
          element("select", { id: "job-state", change: (event) => this.#want("state", event.target.value) },
            ...STATES.map((name) => element("option", { value: name }, name === "all" ? "all states" : name)))),
        this.batchLabel,
        element("label", { class: "filter" }, element("span", { class: "hidden" }, "Search jobs"),
          element("input", {
            id: "job-search", type: "search", placeholder: "Search jobs", "data-search": "",
            input: (event) => this.#want("text", event.target.value.toLowerCase()),
          }))),
      this.none, this.table.element));
  }

  #want(name, value) {
    this.wanted[name] = value;
    this.update();
  }

  update() {
    const jobs = this.store.jobList();
    this.none.hidden = jobs.length > 0;
    this.table.element.hidden = jobs.length === 0;
    this.#showBatches(jobs);
    this.#showVerbs();
    const shown = jobs.filter((job) => this.#isWanted(job));
    const running = jobs.filter(({ state }) => state === "running").length;
    setText(this.total, jobs.length ? `${running} of ${jobs.length} run${shown.length < jobs.length ? `, ${shown.length} shown` : ""}` : "");
    this.table.show(shown);
  }

  #showBatches(jobs) {
    const names = [...new Set(jobs.map(({ batch }) => batch).filter(Boolean))].sort();
    const known = [...this.batches.options].slice(1).map(({ value }) => value);
    this.batchLabel.hidden = !names.length;
    if (names.join("\n") === known.join("\n")) return;
    this.batches.replaceChildren(this.batches.options[0], ...names.map((name) => element("option", { value: name }, name)));
    this.batches.value = names.includes(this.wanted.batch) ? this.wanted.batch : "";
  }

  #isWanted(job) {
    const { state, batch, text } = this.wanted;
    if (state !== "all" && jobState(job) !== state) return false;
    if (batch && job.batch !== batch) return false;
    return !text || [job.job, job.batch, job.kind, problem(job)].join(" ").toLowerCase().includes(text);
  }

  #choose(job, wanted) {
    if (wanted) this.chosen.add(job); else this.chosen.delete(job);
    this.#showVerbs();
  }

  // Actions for the selected jobs: compare several, delete ended ones.
  #showVerbs() {
    for (const job of this.chosen) if (!this.store.jobs.has(job)) this.chosen.delete(job);
    const over = [...this.chosen].every((job) => !["running", "waiting"].includes(this.store.jobs.get(job).state));
    this.delete.hidden = !this.store.operator || !this.chosen.size || !over;
    setText(this.delete, `Delete ${this.chosen.size}`);
    const names = [...this.chosen].map(encodeURIComponent).join(",");
    this.compare.hidden = this.chosen.size < 2;
    this.compare.href = `#/compare?jobs=${names}`;
    setText(this.compare, `Compare ${this.chosen.size}`);
  }

  async #erase() {
    for (const job of await erase([...this.chosen])) this.chosen.delete(job);
    this.update();
  }

  #columns() {
    return [
      { name: "Pick", align: "pick", value: ({ job }) => this.#box(job) },
      { name: "Job", align: "first", value: (job) => link(`#/jobs/${encodeURIComponent(job.job)}`, job.job), sort: (job) => job.job },
      { name: "State", value: (job) => pill(jobState(job)), sort: jobState },
      { name: "Progress", value: (job) => bar(100 * job.progress.fraction, { bad: 101 }), sort: (job) => job.progress.fraction },
      { name: "Loss", align: "right", value: (job) => loss(job.loss), sort: (job) => job.loss },
      { name: "Held-out", align: "right", value: (job) => loss(job.held_out_loss), sort: (job) => job.held_out_loss },
      { name: "Tokens/s", align: "right", value: (job) => (job.state === "running" ? count(job.tokens_per_s) : NONE), sort: (job) => job.tokens_per_s },
      { name: "Nodes", align: "right", value: (job) => (job.state === "running" ? `${job.members_running} of ${job.nodes_wanted}` : job.nodes_wanted), sort: (job) => job.members_running },
      { name: "Kind", value: (job) => [job.kind, job.batch].filter(Boolean).join(" · ") || NONE, sort: (job) => job.kind ?? "" },
      { name: "Began", value: (job) => moment(job.started ?? job.created), sort: (job) => job.started ?? job.created },
      { name: "Took", align: "right", live: true, value: (job) => took(job, this.store.time), sort: (job) => (job.ended ?? this.store.time) - (job.started ?? this.store.time) },
      { name: "Reason", align: "text", value: (job) => { const text = problem(job); return element("span", { title: text }, text.length > 90 ? `${text.slice(0, 89)}…` : text); } },
    ];
  }

  #box(job) {
    return element("input", {
      type: "checkbox", "aria-label": `Compare ${job}`, checked: this.chosen.has(job) && "",
      change: (event) => this.#choose(job, event.target.checked),
    });
  }

  close() {}
}

export function took(job, now) {
  return job.started ? duration(Math.max(1, (job.ended ?? now) - job.started)) : NONE;
}
