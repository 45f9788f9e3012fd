// Jobs, filtered by state, batch and text.

import { erase } from "../lib/actions.js";
import { bar, button, element, link, pill, setText } from "../lib/dom.js";
import { count, duration, loss, moment, NONE } from "../lib/format.js";
import { jobState, nodesOf, problem } from "../lib/store.js";
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
    this.none = firstJob();
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
    setText(this.total, jobs.length ? `${running} of ${jobs.length} running${shown.length < jobs.length ? `, ${shown.length} shown` : ""}` : "");
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
    const batch = this.wanted.batch && !this.chosen.size
      ? this.store.jobList().filter((job) => job.batch === this.wanted.batch).map(({ job }) => job) : [];
    const names = batch.length ? batch : [...this.chosen];
    this.compare.hidden = names.length < 2;
    this.compare.href = `#/compare?jobs=${names.map(encodeURIComponent).join(",")}`;
    setText(this.compare, batch.length ? "Ranking of the batch" : `Compare ${names.length}`);
  }

  async #erase() {
    for (const job of await erase([...this.chosen])) this.chosen.delete(job);
    this.update();
  }

  #columns() {
    return [
      { name: "Select", align: "pick", value: ({ job }) => this.#box(job) },
      { name: "Job", align: "first", value: (job) => link(`#/jobs/${encodeURIComponent(job.job)}`, job.job), sort: (job) => job.job },
      { name: "State", value: (job) => pill(jobState(job)), sort: jobState },
      { name: "Progress", value: (job) => progressCell(job), sort: (job) => job.progress.fraction },
      { name: "Loss", align: "right", value: (job) => loss(job.loss), sort: (job) => job.loss },
      { name: "Held-out", align: "right", value: (job) => loss(job.held_out_loss), sort: (job) => job.held_out_loss },
      { name: "Tokens/s", align: "right", value: (job) => (job.state === "running" ? count(job.tokens_per_s) : NONE), sort: (job) => job.tokens_per_s },
      { name: "Nodes", align: "right", value: nodesOf, sort: (job) => job.members_running },
      { name: "Kind", value: (job) => [job.kind, job.batch].filter(Boolean).join(" · ") || NONE, sort: (job) => job.kind ?? "" },
      { name: "Submitted", value: (job) => moment(job.created), sort: (job) => job.created },
      { name: "Elapsed", align: "right", hint: "Training time; the wall clock in brackets, with waits and stops", value: took, sort: ({ progress }) => progress.training_s },
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

// How long a job has trained, and in brackets the wall clock where that is longer.
export function took({ progress: { training_s: trained, wall_s: wall } }) {
  if (wall == null) return NONE;
  return wall - trained > 1 ? `${duration(trained)} (${duration(wall)})` : duration(trained);
}

// A share of a known total, else the steps alone.
function progressCell({ progress, state }) {
  if (progress.steps || state === "done") return bar(100 * progress.fraction);
  return progress.step ? `step ${count(progress.step)}` : NONE;
}

// What to type for a first job: things that exist, in every installation.
function firstJob() {
  return element("div", { class: "first-job" },
    element("p", null, "No job yet. On the hub's machine, or any with a login, type one of these:"),
    element("dl", { class: "facts" }, ...[
      ["atoll run demo", "a small GPT on all machines, a few minutes"],
      ["atoll run train.py --nodes 2", "your own training script on two machines"],
      ["atoll run job.toml", "a model, data and method that a job file names"],
    ].map(([text, what]) => element("div", null, element("dt", null, element("code", null, text)), element("dd", null, what)))));
}
