// Page of one job: its state and tabs.

import { jobButtons } from "../lib/actions.js";
import { element, fill, link, setPill, setText } from "../lib/dom.js";
import { bytes, count, duration, loss, percent } from "../lib/format.js";
import { ChallengesPart } from "./challenges.js";
import { JobData } from "./data.js";
import { FilesPart } from "./files.js";
import { LearningPart, score } from "./learning.js";
import { MembersPart } from "./members.js";
import { OutputPart } from "./output.js";
import { OverviewPart } from "./overview.js";
import { TimelinePart } from "./timeline.js";
import { criticOf, policiesOf } from "../lib/learning_curves.js";
import { jobState, problem } from "../lib/store.js";

const PARTS = {
  overview: ["Overview", OverviewPart], timeline: ["Timeline", TimelinePart],
  members: ["Members", MembersPart], challenges: ["Challenges", ChallengesPart], output: ["Output", OutputPart], files: ["Files", FilesPart],
};

const SHOWN_POLICIES = 6;

export class JobView {
  constructor(store, { parts: [job, part = "overview"] }) {
    this.store = store;
    this.job = job; // the stream sends its updates
    this.title = job;
    this.data = new JobData(job);
    this.state = element("span", { class: "pill", id: "job-state-now" });
    this.buttons = element("div", { class: "actions" });
    this.reason = element("p", { class: "reason", role: "status" });
    this.each = element("p", { class: "quiet", id: "job-each" });
    this.progress = element("progress", { max: "1", value: "0", "aria-label": "Progress in optimizer steps" });
    this.progressText = element("p", { class: "quiet" });
    this.tiles = element("dl", { class: "tiles" });
    this.tabs = element("nav", { class: "tabs", "aria-label": "Parts of the job" },
      ...Object.entries(PARTS).map(([name, [text]]) =>
        link(`#/jobs/${encodeURIComponent(job)}/${name}`, text, { "data-part": name })));
    this.place = element("div", { class: "part" });
    this.element = element("div", { class: "view" },
      element("section", { class: "card", "aria-labelledby": "job-title" },
        element("div", { class: "head" },
          link("#/jobs", "Jobs", { class: "quiet" }), element("span", { class: "quiet", "aria-hidden": "true" }, "/"),
          element("h2", { id: "job-title" }, job), this.state, element("span", { class: "space" }), this.buttons),
        this.reason, this.each, this.progress, this.progressText, this.tiles),
      this.tabs, this.place);
    this.#open(part);
  }

  // History first, then the stream.
  async begin() { return this.data.load(); }

  go({ parts: [job, part = "overview"] }) {
    if (job !== this.job) return false;
    this.#open(part);
    this.update();
    return true;
  }

  // RL jobs have their own overview; the kind of a job is known from the first tick.
  #open(wanted) {
    const name = PARTS[wanted] ? wanted : "overview";
    const kind = name === "overview" && this.data.view?.kind === "rl" ? LearningPart : PARTS[name][1];
    if (this.shown === name && this.part instanceof kind) return;
    this.part?.close();
    this.shown = name;
    for (const tab of this.tabs.children) {
      if (tab.dataset.part === name) tab.setAttribute("aria-current", "page");
      else tab.removeAttribute("aria-current");
    }
    for (const key of Object.keys(this.data.changed)) this.data.changed[key] = true;
    this.part = new kind(this.store, this.data);
    this.place.replaceChildren(this.part.element);
  }

  tick(tick) {
    if (tick.deleted === this.job) this.gone = true;
    this.data.add(tick);
  }

  update() {
    const job = this.data.view;
    if (this.gone) {
      this.buttons.replaceChildren();
      setText(this.reason, "This job was deleted.");
      return;
    }
    if (!job) {
      if (this.store.time && !this.store.jobs.has(this.job)) setText(this.reason, "Unknown job.");
      return;
    }
    setPill(this.state, jobState(job));
    setText(this.reason, [job.paused_reason, problem(job)].filter(Boolean).join(" · "));
    const each = [job.island, job.inner].filter(Boolean).join(" · ");
    setText(this.each, each ? `each member: ${each}` : "");
    this.each.hidden = !each;
    this.reason.className = job.state === "failed" ? "reason bad" : "reason";
    const signature = `${job.state}/${job.stopping}/${job.min_nodes}/${job.nodes_wanted}/${this.store.operator}`;
    if (signature !== this.signature) {
      this.signature = signature;
      this.buttons.replaceChildren(...jobButtons(this.store, job));
    }
    const timeline = this.tabs.querySelector("[data-part=timeline]");
    this.tabs.querySelector("[data-part=challenges]").hidden = !job.verified;
    timeline.hidden = job.kind === "rl" && !job.committed_round;
    this.#showProgress(job);
    this.#open(this.shown);
    if (job.kind === "rl") this.#showPolicies(job);
    else this.#showTiles(job);
    this.part.update();
  }

  #showProgress({ progress, started, ended, state, kind }) {
    this.progress.value = progress.fraction;
    const parts = [kind === "rl" ? `${percent(100 * progress.fraction)} of the steps of all policies`
      : `step ${count(progress.step)} of ${count(progress.steps)}`];
    const so_far = started ? Math.max(0, (ended ?? this.store.time) - started) : null;
    if (so_far != null) parts.push(ended ? `took ${duration(so_far)}` : `${duration(so_far)} so far`);
    if (state === "running" && progress.fraction > 0.02 && so_far > 5) {
      parts.push(`about ${duration((so_far / progress.fraction) * (1 - progress.fraction))} left`);
    }
    setText(this.progressText, parts.join(" · "));
  }

  #showTiles(job) {
    const busy = this.data.curves.of("utilisation").map((curve) => curve.y.slice(-5)).flat();
    const running = job.state === "running";
    const live = job.members.filter(({ state }) => state === "running").length;
    const tiles = [
      ["Round", count(job.committed_round), job.aborted_rounds ? `${job.aborted_rounds} aborted` : ""],
      ["Train loss", loss(job.loss), ""],
      ["Held-out loss", loss(job.held_out_loss), ""],
      ["Tokens/s", running ? count(job.tokens_per_s) : "–", ""],
      ["Nodes", running ? `${live} of ${job.nodes_wanted}` : String(job.nodes_wanted), [job.min_nodes ? `at least ${job.min_nodes}` : "", job.island ? `each: ${job.island}` : ""].filter(Boolean).join(", ")],
      ["Computing", percent(busy.length ? busy.reduce((a, b) => a + b, 0) / busy.length : null), "of the time"],
      ["Sent", bytes(job.sent_bytes), ""],
      ["Received", bytes(job.received_bytes), ""],
    ];
    this.#fillTiles(tiles);
  }

  // A tile per policy, up to a limit, and shared figures.
  #showPolicies(job) {
    const policies = policiesOf(job);
    const values = (members, name) => members.map((member) => member.values?.[name]).filter((value) => value != null);
    const sum = (name) => policies.flatMap(({ members }) => values(members, name)).reduce((a, b) => a + b, 0);
    const critic = criticOf(job)?.values ?? {};
    const returns = policies.slice(0, SHOWN_POLICIES).map(({ policy, members }) => {
      const [now] = values(members, "return"), [best] = values(members, "return_best");
      return [policy, score(now), best == null ? "" : `best ${score(best)}`];
    });
    this.#fillTiles([
      ...returns,
      ["Environment steps", count(sum("env_steps")), ""],
      ["Steps/s", job.state === "running" ? count(sum("env_steps_per_s")) : "–", "all policies"],
      ...(criticOf(job) ? [["Critic", `v${count(critic.value_version ?? critic.updates ?? 0)}`, `${count(critic.trajectories ?? 0)} trajectories`]] : []),
      ["Sent", bytes(job.sent_bytes), ""],
    ]);
  }

  #fillTiles(tiles) {
    fill(this.tiles, ...tiles.map(([name, value, note]) => element("div", null,
      element("dt", null, name), element("dd", null, element("span", { class: "value" }, value), note ? element("small", null, ` ${note}`) : null))));
  }

  close() { this.part?.close(); }
}
