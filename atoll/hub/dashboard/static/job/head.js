// What stands first on a job's page: what runs and how it is, why it waits, what made it fail, or
// what a finished one leaves.

import { button, element, fill, link } from "../lib/dom.js";
import { clock, count, duration, plural } from "../lib/format.js";
import { get, path } from "../lib/client.js";
import { ask, say } from "../lib/dialog.js";
import { jobState } from "../lib/store.js";
import { fileAddress } from "./files.js";

// One sentence: what, how, on how many machines; health; the slowest; the end.
export function sentence(job, { alarms, worth, time }) {
  const nodes = job.state === "running" ? job.members_running || job.members_placed : job.state === "waiting" ? job.nodes_wanted : job.members_placed || job.nodes_wanted;
  const parameters = Math.max(0, ...job.members.map(({ values }) => values?.parameters ?? 0));
  const what = `${job.work || job.job}${parameters ? ` ${millions(parameters)}` : ""}`;
  const parts = [[what, job.method, job.kind === "command" ? "" : plural(nodes, "node")].filter(Boolean).join(", ")];
  if (job.state !== "running") return job.kind === "command" ? parts[0] : `${parts[0]}.`;
  const own = alarms.filter((alarm) => alarm.job === job.job);
  const health = job.stopping ? "Stopping" : jobState(job) === "paused" ? "Paused" : own.length ? plural(own.length, "alarm")
    : job.starting && !job.members_running ? "" : job.progress.steps && !job.progress.step ? "No step is done yet" : "Healthy";
  const slowest = slowestOf(job, worth);
  const left = job.progress.left_s;
  parts.push([health, slowest ? `slowest ${slowest}` : "", left == null ? "" : `done about ${clock(time + left).slice(0, 5)}`].filter(Boolean).join("; "));
  if (job.starting) parts.push(capital(job.starting));
  return `${parts.filter(Boolean).join(". ")}.`;
}

const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);

const MUCH_SLOWER = 0.9; // of the fastest; closer together none is called slow

// The machine that adds least to the group, or, until that is known, trains slowest by itself.
function slowestOf({ members }, worth) {
  const adds = (worth?.nodes ?? []).map(({ node, adds_tokens_per_s: speed }) => ({ node, speed }));
  const speeds = members.map(({ node, tokens_per_s: speed }) => ({ node, speed }));
  const known = [adds, speeds].map((all) => all.filter(({ speed }) => speed != null)).find((all) => all.length > 1);
  if (!known) return "";
  const [least, most] = [Math.min, Math.max].map((pick) => pick(...known.map(({ speed }) => speed)));
  return least < MUCH_SLOWER * most ? known.find(({ speed }) => speed === least).node : "";
}

// A number of parameters as people say it: "0.8 M", "1.2 B".
function millions(parameters) {
  if (parameters >= 1e9) return `${(parameters / 1e9).toFixed(1)} B`;
  return parameters >= 5e4 ? `${(parameters / 1e6).toFixed(1)} M` : count(parameters);
}

// "training 12 min 36 s, wall clock 17 min 44 s", and what is left.
export function times({ progress, state, kind }) {
  const { training_s: trained, wall_s: wall, left_s: left } = progress;
  if (wall == null) return "";
  const trains = kind === "rl" || progress.step > 0;
  const parts = [`${trains ? "training" : state === "running" ? "running" : "ran"} ${duration(trained)}`];
  if (wall - trained > 1) parts.push(`wall clock ${duration(wall)}`);
  return [parts.join(", "), state === "running" && left != null ? `${duration(left)} left` : ""].filter(Boolean).join(" · ");
}

// The traceback and the remedy of a failed job.
export class Failure {
  constructor() {
    this.element = element("section", { class: "card failure", id: "failure", "aria-labelledby": "failure-title", hidden: "" });
  }

  show(job) {
    const failed = job.state === "failed";
    this.element.hidden = !failed;
    if (!failed) return;
    const { what, given, expected, remedy } = job.error ?? {};
    const status = job.exit_code == null || what?.includes("exit status") ? "" : `, exit status ${job.exit_code}`;
    const where = job.failed_member ? `on ${job.failed_node}${status}` : "";
    fill(this.element,
      element("h2", { id: "failure-title" }, "Why it failed"),
      element("p", { class: "reason bad" }, what ?? job.reason ?? "No reason is known.", where ? ` (${where})` : ""),
      given && !what?.includes(given) && given !== job.failed_member ? element("p", null, `${/^line \d+ of /.test(given) ? "Where" : "Given"}: ${given}`) : null,
      expected && what && !what.includes("exit status") ? element("p", null, `Expected: ${expected}`) : null,
      job.last_lines?.length ? element("pre", { class: "output short", tabindex: "0", "aria-label": "Last lines of the failed process" }, job.last_lines.join("\n")) : null,
      remedy ? element("p", null, element("b", null, "What to do: "), remedy) : null);
  }
}

const SAMPLE = 600; // characters

// Verbs of a finished job, and the text that its model wrote.
export class Finished {
  constructor(store, name) {
    this.store = store;
    this.name = name;
    this.verbs = element("div", { class: "actions" });
    this.sample = element("blockquote", { class: "sample", hidden: "" });
    this.element = element("div", { class: "finished", hidden: "" }, this.verbs, this.sample);
  }

  async show(job) {
    this.element.hidden = job.state !== "done" && job.state !== "stopped";
    const sample = job.result?.sample ?? job.members.map(({ result }) => result?.sample).find(Boolean);
    this.sample.hidden = !sample;
    if (sample) fill(this.sample, String(sample).slice(0, SAMPLE));
    if (this.element.hidden || this.loaded === job.state) return;
    this.loaded = job.state;
    const files = await get(path("jobs", this.name, "files")) ?? [];
    const named = (wanted) => files.filter(({ name }) => wanted.test(name)).at(-1);
    const report = named(/(^|\/)report\.html$/), model = named(/(^|\/)(model|merged)[^/]*\.(safetensors|pt|zip)$/);
    fill(this.verbs,
      report ? link(fileAddress(this.name, report.name), "Open report", { class: "button main", target: "_blank" }) : null,
      model ? link(fileAddress(this.name, model.name), "Download model", { class: "button", download: model.name.split("/").at(-1) }) : null);
    if (this.store.operator) this.verbs.append(button("Run again", () => this.#again()));
  }

  // A new job with the same job file and the texts sent with it.
  async #again() {
    const choice = await ask({ title: `Run ${this.name} again?`, verb: "Run again", text: "A new job starts from the same job file." });
    const view = choice && await get(path("jobs", this.name));
    if (!view) return;
    const files = {};
    for (const name of view.files) files[name] = await (await fetch(fileAddress(this.name, name))).text();
    const answer = await fetch("api/jobs", {
      method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify({ spec: view.spec, files }),
    });
    const reply = await answer.json();
    if (answer.ok) location.hash = `#/jobs/${encodeURIComponent(reply.job)}`;
    else say([reply.error.what, reply.error.remedy].filter(Boolean).join(" · "), "bad");
  }
}
