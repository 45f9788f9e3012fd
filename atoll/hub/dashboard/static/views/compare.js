// Compare: overlaid curves of several jobs against steps, tokens or time, and their last figures.

import { Chart, ChartGroup, shade } from "../lib/charts.js";
import { Curves } from "../lib/curves.js";
import { element, empty, link, pill, setText } from "../lib/dom.js";
import { ReturnPanels } from "./compare_returns.js";
import { bytes, count, loss, NONE } from "../lib/format.js";
import { get, path } from "../lib/client.js";
import { score } from "../job/learning.js";
import { LearningCurves } from "../lib/learning_curves.js";
import { took } from "./jobs.js";
import { jobState, nodesOf } from "../lib/store.js";
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
    this.group = new ChartGroup();
    const own = { legend: false, group: this.group };
    this.charts = [
      [new Chart({ id: "compare-loss", title: "Train loss", unit: "mean of the members", ...own }), "loss"],
      [new Chart({ id: "compare-held-out", title: "Held-out loss", ...own }), "held_out"],
      [new Chart({ id: "compare-speed", title: "Speed", unit: "tokens per second, all members", zero: true, format: count, ...own }), "tokens_per_s"],
    ];
    this.returns = new ReturnPanels();
    this.losses = element("div", { class: "charts three" }, ...this.charts.map(([chart]) => chart.element));
    this.list = element("ul", { class: "choices", "aria-label": "Jobs to compare" });
    this.table = new Table({ label: "Figures", columns: this.#columns(), key: (row) => row.job, cards: true });
    this.none = empty("Choose jobs above.");
    this.noJobs = element("p", { class: "empty" }, "Nothing to compare yet: it shows the curves of two or more jobs side by side. ", link("#/jobs", "Start a job"), " first.");
    this.settings = new Map(); // job -> its settings by name
    this.differing = element("section", { class: "card differs", "aria-labelledby": "differs-title", hidden: "" },
      element("h2", { id: "differs-title" }, "Settings that differ"), this.place = element("div"));
    this.ranking = element("p", { class: "quiet", id: "ranking" });
    this.element = element("div", { class: "view" },
      element("section", { class: "card", "aria-labelledby": "compare-title" },
        element("div", { class: "head" }, element("h2", { id: "compare-title" }, "Compare jobs"),
          element("span", { class: "space" }), this.tools = element("span", { class: "tools" }, ...this.group.tools,
            element("label", { class: "filter" }, "against ", element("select", {
              id: "compare-axis", change: (event) => { this.axis = event.target.value; this.#keep(); this.#draw(); },
            }, ...AXES.map(([value, text]) => element("option", { value, selected: value === this.axis && "" }, text)))))),
        this.list, this.none, this.noJobs,
        this.losses, this.returns.element),
      this.figures = element("section", { class: "card", "aria-labelledby": "figures-title" },
        element("h2", { id: "figures-title" }, "Figures"), this.ranking, this.table.element),
      this.differing);
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
    const shown = jobs.filter(({ job }) => this.chosen.includes(job));
    this.best = bests(shown);
    const ranked = ranking(shown);
    this.table.show(ranked);
    const scored = ranked.filter((job) => scoreOf(job) != null);
    setText(this.ranking, scored.length > 1 ? `Ranking by ${scored[0].held_out_loss == null ? "train" : "held-out"} loss: ${scored.map(({ job }, at) => `${at + 1}. ${job}`).join(", ")}` : "");
    this.none.hidden = this.chosen.length > 0 || !jobs.length;
    this.noJobs.hidden = jobs.length > 0;
    for (const part of [this.losses, this.list, this.tools, this.figures]) part.classList.toggle("gone", !jobs.length);
    this.#showDiffering();
  }

  async #showDiffering() {
    const missing = this.chosen.filter((job) => !this.settings.has(job));
    for (const job of missing) this.settings.set(job, null);
    await Promise.all(missing.map(async (job) => this.settings.set(job, settingsOf((await get(path("jobs", job)))?.spec ?? ""))));
    const known = this.chosen.filter((job) => this.settings.get(job));
    const names = [...new Set(known.flatMap((job) => [...this.settings.get(job).keys()]))];
    const rows = names.filter((name) => name !== "[job] name" && new Set(known.map((job) => this.settings.get(job).get(name))).size > 1)
      .map((name) => ({ name, values: known.map((job) => this.settings.get(job).get(name) ?? NONE) }));
    this.differing.hidden = known.length < 2;
    const signature = JSON.stringify([known, rows]);
    if (signature === this.drawnSettings) return;
    this.drawnSettings = signature;
    const table = new Table({
      label: "Settings that differ", key: (row) => row.name, cards: true, columns: [
        { name: "Setting", align: "first", value: ({ name }) => name },
        ...known.map((job, at) => ({ name: job, align: "wrap", value: ({ values }) => element("code", null, values[at]) })),
      ],
    });
    table.show(rows);
    this.place.replaceChildren(rows.length ? table.element : empty("None: their job files are the same."));
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
    const units = [...new Set(rows.filter((row) => row && row.kind !== "rl").map((row) => row.loss_unit))];
    const unit = units.length > 1 ? "of different kinds" : units[0] ?? "";
    this.charts[0][0].rename("Train loss", unit ? `mean of the members, ${unit}` : "mean of the members");
    this.charts[1][0].rename("Held-out loss", unit);
    for (const [chart, kind] of this.charts) {
      chart.draw(this.chosen.flatMap((job, at) => {
        const curves = this.data.get(job)?.curves;
        if (!curves) return [];
        const { x, y } = curves.whole(kind, this.axis, { sum: kind === "tokens_per_s" });
        const start = this.axis === "time" ? this.store.jobs.get(job)?.started ?? x[0] ?? 0 : 0;
        const factor = this.axis === "tokens" ? curves.members.size : 1;
        return [{ owner: job, y, x: x.map((value) => (value - start) * factor), color: shade(at) }];
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
      { name: "Train loss", align: "right", value: (job) => this.#marked(job, "loss", loss(job.loss)), sort: (job) => job.loss },
      { name: "Held-out", align: "right", value: (job) => this.#marked(job, "held_out_loss", loss(job.held_out_loss)), sort: (job) => job.held_out_loss },
      { name: "Return", align: "right", optional: true, live: true, value: (job) => this.#returns(job), sort: (job) => this.data.get(job.job)?.learning.last("return") ?? null },
      { name: "Tokens/s", align: "right", value: (job) => this.#marked(job, "speed", count(speedOf(job))), sort: speedOf },
      { name: "Sent by all", align: "right", value: (job) => bytes(job.sent_bytes), sort: (job) => job.sent_bytes },
      { name: "Nodes", align: "right", value: nodesOf, sort: (job) => job.members_placed },
      { name: "Elapsed", align: "right", value: took },
    ];
  }

  // The best of a column is bold, and says so.
  #marked({ job }, name, text) {
    const best = this.best?.[name] === job;
    return element("span", { class: best ? "best" : null }, best ? `${text} best` : text);
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

// Tokens per second of all members while training, ended jobs too.
function speedOf({ speed, tokens_per_s: now, state }) {
  return state === "running" ? now : speed ?? null;
}

const scoreOf = (job) => job.held_out_loss ?? job.loss;

function ranking(jobs) {
  return [...jobs].sort((a, b) => (scoreOf(a) ?? Infinity) - (scoreOf(b) ?? Infinity));
}

function bests(jobs) {
  const best = (value, sign) => {
    const known = jobs.filter((job) => value(job) != null);
    return known.length > 1 ? known.reduce((a, b) => (sign * value(b) > sign * value(a) ? b : a)).job : "";
  };
  return { loss: best(({ loss: one }) => one, -1), held_out_loss: best(({ held_out_loss: one }) => one, -1), speed: best(speedOf, 1) };
}

// Settings of a job file that has every default written out: "[train] lr" -> its text.
function settingsOf(spec) {
  const found = new Map();
  let table = "";
  for (const line of spec.split("\n")) {
    const [, head] = line.match(/^\[+([^\]]+)\]+\s*$/) ?? [];
    const [, key, value] = line.match(/^([\w."-]+)\s*=\s*(.*)$/) ?? [];
    if (head) table = head;
    else if (key) found.set(`[${table}] ${key}`, value);
  }
  return found;
}
