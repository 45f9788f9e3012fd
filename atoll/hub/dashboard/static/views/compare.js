// Compare: overlaid curves of several jobs against steps, tokens or time, and their last figures.

import { Chart, colour } from "../lib/charts.js";
import { Curves } from "../lib/curves.js";
import { element, empty, link, pill } from "../lib/dom.js";
import { ReturnPanels } from "./compare_returns.js";
import { bytes, count, loss, NONE } from "../lib/format.js";
import { get, path } from "../lib/client.js";
import { score } from "../job/learning.js";
import { LearningCurves } from "../lib/learning_curves.js";
import { took } from "./jobs.js";
import { jobState } from "../lib/store.js";
import { Table } from "../lib/table.js";

const AXES = [["step", "step"], ["tokens", "tokens"], ["time", "time since start"]];
const REFRESH_MS = 3000;
const POINTS = 400;
const FIRST_CHOSEN = 3;

export class CompareView {
  constructor(store, { query }) {
    this.store = store;
    this.title = "Compare";
    this.axis = AXES.some(([name]) => name === query.get("x")) ? query.get("x") : "step";
    this.chosen = (query.get("jobs") ?? "").split(",").filter(Boolean);
    this.data = new Map();
    this.charts = [
      [new Chart({ id: "compare-loss", title: "Train loss", note: "mean of the members", format: "", legend: false }), "loss"],
      [new Chart({ id: "compare-held-out", title: "Held-out loss", note: "nats per token", format: "", legend: false }), "held_out"],
      [new Chart({ id: "compare-speed", title: "Speed", note: "tokens per second, all members", zero: true, legend: false }), "tokens_per_s"],
    ];
    this.returns = new ReturnPanels();
    this.losses = element("div", { class: "charts three" }, ...this.charts.map(([chart]) => chart.element));
    this.list = element("ul", { class: "choices", "aria-label": "Jobs to compare" });
    this.table = new Table({ label: "Figures", columns: this.#columns(), key: (row) => row.job, cards: true });
    this.none = empty("Choose jobs above.");
    this.element = element("div", { class: "view" },
      element("section", { class: "card", "aria-labelledby": "compare-title" },
        element("div", { class: "head" }, element("h2", { id: "compare-title" }, "Compare jobs"),
          element("span", { class: "space" }),
          element("label", { class: "filter" }, "against ", element("select", {
            id: "compare-axis", change: (event) => { this.axis = event.target.value; this.#keep(); this.#draw(); },
          }, ...AXES.map(([value, text]) => element("option", { value, selected: value === this.axis && "" }, text))))),
        this.list, this.none,
        this.losses, this.returns.element),
      element("section", { class: "card", "aria-labelledby": "figures-title" },
        element("h2", { id: "figures-title" }, "Figures"), this.table.element));
    this.timer = setInterval(() => this.#refresh(), REFRESH_MS);
  }

  update() {
    const jobs = this.store.jobList();
    if (!this.begun && jobs.length) {
      this.begun = true;
      if (!this.chosen.length) {
        this.chosen = jobs.filter(({ progress }) => progress.step > 0).slice(0, FIRST_CHOSEN).map(({ job }) => job);
      }
      this.#refresh();
    }
    this.#showChoices(jobs);
    this.table.show(jobs.filter(({ job }) => this.chosen.includes(job)));
    this.none.hidden = this.chosen.length > 0;
  }

  #showChoices(jobs) {
    const signature = jobs.map(({ job }) => job).join("\n");
    if (signature === this.signature) return;
    this.signature = signature;
    this.list.replaceChildren(...jobs.map(({ job }) => element("li", null, element("label", null,
      element("input", {
        type: "checkbox", checked: this.chosen.includes(job) && "",
        change: (event) => this.#choose(job, event.target.checked),
      }), element("span", { class: "swatch", "data-job": job }), job))));
    this.#colourChoices();
  }

  #colourChoices() {
    for (const swatch of this.list.querySelectorAll(".swatch")) {
      const at = this.chosen.indexOf(swatch.dataset.job);
      swatch.style.background = at < 0 ? "var(--line)" : `var(--series-${at % 8})`;
    }
  }

  #choose(job, wanted) {
    this.chosen = wanted ? [...this.chosen, job] : this.chosen.filter((name) => name !== job);
    this.#colourChoices();
    this.#keep();
    this.update();
    this.#refresh();
  }

  // The address stores the selection, so that it can be bookmarked and shared.
  #keep() {
    const names = this.chosen.map(encodeURIComponent).join(",");
    history.replaceState(null, "", `#/compare?jobs=${names}&x=${this.axis}`);
  }

  async #refresh() {
    const loads = this.chosen.map(async (job) => {
      const known = this.data.get(job);
      if (!known) {
        const found = await get("api/history", { job, points: POINTS });
        const curves = new Curves();
        const learning = new LearningCurves();
        curves.add(found?.points ?? []);
        learning.add(found?.points ?? []);
        this.data.set(job, { curves, learning, last: found?.last ?? 0 });
        return true;
      }
      const row = this.store.jobs.get(job);
      if (row && !["running"].includes(row.state) && known.settled) return false;
      const found = await get(path("jobs", job, "metrics"), { after: known.last, limit: 5000 });
      if (!found?.points.length) { known.settled = row?.state !== "running"; return false; }
      known.curves.add(found.points);
      known.learning.add(found.points);
      known.last = found.last;
      return true;
    });
    const news = await Promise.all(loads);
    const drawnNames = this.chosen.join();
    if (news.some(Boolean) || drawnNames !== this.drawnNames) { this.drawnNames = drawnNames; this.#draw(); }
  }

  #draw() {
    const rows = this.chosen.map((job) => this.store.jobs.get(job));
    this.losses.hidden = rows.length > 0 && rows.every((row) => row?.kind === "rl");
    this.returns.draw(this.chosen.flatMap((job, at) => {
      const row = this.store.jobs.get(job);
      const learning = this.data.get(job)?.learning;
      return row?.kind === "rl" && learning ? [{ job, roles: row.roles, started: row.started, learning, at }] : [];
    }), this.axis);
    for (const [chart, kind] of this.charts) {
      chart.draw(this.chosen.flatMap((job, at) => {
        const curves = this.data.get(job)?.curves;
        if (!curves) return [];
        const { x, y } = curves.whole(kind, this.axis, { sum: kind === "tokens_per_s" });
        const start = this.axis === "time" ? this.store.jobs.get(job)?.started ?? x[0] ?? 0 : 0;
        const factor = this.axis === "tokens" ? curves.members.size : 1;
        return [{ owner: job, y, x: x.map((value) => (value - start) * factor), color: colour(`--series-${at % 8}`) }];
      }), [], this.axis === "time" ? "seconds" : this.axis);
    }
  }

  #columns() {
    return [
      { name: "Job", align: "first", value: ({ job }) => link(`#/jobs/${encodeURIComponent(job)}`, job), sort: ({ job }) => job },
      { name: "State", value: (job) => pill(jobState(job)), sort: jobState },
      { name: "Step", align: "right", value: (job) => count(job.progress.step), sort: (job) => job.progress.step },
      { name: "Rounds", align: "right", value: (job) => job.committed_round, sort: (job) => job.committed_round },
      { name: "Aborted", align: "right", value: (job) => job.aborted_rounds, sort: (job) => job.aborted_rounds },
      { name: "Train loss", align: "right", value: (job) => loss(job.loss), sort: (job) => job.loss },
      { name: "Held-out", align: "right", value: (job) => loss(job.held_out_loss), sort: (job) => job.held_out_loss },
      { name: "Return", align: "right", optional: true, live: true, value: (job) => this.#returns(job), sort: (job) => this.data.get(job.job)?.learning.last("return") ?? null },
      { name: "Tokens/s", align: "right", value: (job) => count(job.tokens_per_s || this.data.get(job.job)?.curves.last("tokens_per_s")), sort: (job) => job.tokens_per_s },
      { name: "Sent", align: "right", value: (job) => bytes(job.sent_bytes), sort: (job) => job.sent_bytes },
      { name: "Nodes", align: "right", value: (job) => job.nodes_wanted, sort: (job) => job.nodes_wanted },
      { name: "Took", align: "right", live: true, value: (job) => took(job, this.store.time) },
    ];
  }

  // The newest return of each policy.
  #returns({ job, roles = [] }) {
    const learning = this.data.get(job)?.learning;
    const returns = learning ? learning.byPolicy(roles, "return").map(({ policy, last }) => `${policy} ${score(last)}`) : [];
    return returns.join(", ") || NONE;
  }

  close() {
    clearInterval(this.timer);
    this.returns.close();
    for (const [chart] of this.charts) chart.close();
  }
}
