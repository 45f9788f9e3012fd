// Page of one job: its state and tabs.

import { jobButtons } from "../lib/actions.js";
import { element, fill, link, setPill, setText } from "../lib/dom.js";
import { bytes, count, loss, percent } from "../lib/format.js";
import { ChallengesPart } from "./challenges.js";
import { CommandPart } from "./command.js";
import { Failure, Finished, sentence, times } from "./head.js";
import { JobData } from "./data.js";
import { FilesPart } from "./files.js";
import { LearningPart, score } from "./learning.js";
import { MembersPart } from "./members.js";
import { OutputPart } from "./output.js";
import { OverviewPart } from "./overview.js";
import { TimelinePart } from "./timeline.js";
import { criticOf, policiesOf } from "../lib/learning_curves.js";
import { isProgram, jobState, nodesOf, problem } from "../lib/store.js";

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
    this.sentence = element("p", { class: "sentence", id: "job-sentence" });
    this.each = element("p", { class: "quiet", id: "job-each" });
    this.failure = new Failure();
    this.finished = new Finished(store, job);
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
        this.sentence, this.reason, this.each, this.progress, this.progressText, this.finished.element, this.tiles),
      this.failure.element, this.tabs, this.place);
    this.tabs.hidden = this.place.hidden = this.progress.hidden = true; // until it is known what there is
    setText(this.progressText, "loading …");
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

  // RL jobs and programs have their own overview; the kind of a job is known from the first tick.
  #open(wanted) {
    const name = PARTS[wanted] ? wanted : "overview";
    const { view } = this.data;
    const kind = name !== "overview" || !view ? PARTS[name][1]
      : view.kind === "rl" ? LearningPart : isProgram(view) ? CommandPart : OverviewPart;
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
    if (this.gone && job) {
      this.buttons.replaceChildren();
      setText(this.reason, "This job was deleted.");
      return;
    }
    if (!job) {
      if (this.store.time && !this.store.jobs.has(this.job)) this.#unknown();
      return;
    }
    this.tabs.hidden = this.place.hidden = this.state.hidden = false; // it may have been unknown a moment ago
    setPill(this.state, jobState(job));
    setText(this.sentence, sentence(job, { alarms: this.store.alarms, worth: this.data.worth, time: this.store.time }));
    const why = job.state === "failed" ? "" : [job.paused_reason, problem(job)].filter(Boolean).join(" · ");
    setText(this.reason, why && job.state === "waiting" ? `Waiting: ${why}` : why);
    this.failure.show(job);
    this.finished.show(job);
    const each = [job.island, job.inner].filter(Boolean).join(" · ");
    setText(this.each, each ? `each member: ${each}` : "");
    this.each.hidden = !each;
    this.reason.className = job.state === "waiting" || job.paused ? "reason note" : "reason";
    const signature = `${job.state}/${job.stopping}/${job.min_nodes}/${job.nodes_wanted}/${this.store.operator}`;
    if (signature !== this.signature) {
      this.signature = signature;
      this.buttons.replaceChildren(...jobButtons(this.store, job));
    }
    const timeline = this.tabs.querySelector("[data-part=timeline]");
    this.tabs.querySelector("[data-part=challenges]").hidden = !job.verified;
    timeline.hidden = !job.committed_round && !job.aborted_rounds && (job.kind === "rl" || isProgram(job) || job.state !== "running");
    this.tabs.querySelector("[data-part=output]").hidden = isProgram(job); // its overview shows it
    this.#showProgress(job);
    this.#open(this.shown);
    if (job.kind === "rl") this.#showPolicies(job);
    else this.#showTiles(job);
    this.part.update();
  }

  #showProgress(job) {
    const { progress, state, kind } = job;
    const known = progress.steps > 0;
    this.progress.hidden = !known || state === "waiting";
    this.progress.value = progress.fraction;
    const steps = kind === "rl" ? `${percent(100 * progress.fraction)} of the steps of all policies`
      : known ? `step ${count(progress.step)} of ${count(progress.steps)}` : progress.step ? `step ${count(progress.step)}` : "";
    setText(this.progressText, [state === "waiting" ? "" : steps, times(job)].filter(Boolean).join(" · "));
  }

  // Only what is known of a job of this kind.
  #showTiles(job) {
    const busy = this.data.curves.of("utilisation").map((curve) => curve.y.slice(-5)).flat();
    const running = job.state === "running";
    const nodes = [job.min_nodes ? `at least ${job.min_nodes}` : "", job.island ? `each: ${job.island}` : ""].filter(Boolean).join(", ");
    const tiles = [
      job.committed_round || job.aborted_rounds ? ["Round", count(job.committed_round), job.aborted_rounds ? `${job.aborted_rounds} aborted` : ""] : null,
      job.loss == null ? null : ["Train loss", loss(job.loss), ""],
      job.held_out_loss == null ? null : ["Held-out loss", loss(job.held_out_loss), ""],
      running && job.tokens_per_s ? ["Tokens/s", count(job.tokens_per_s), ""] : null,
      ["Nodes", nodesOf(job), nodes],
      busy.length ? ["Computing", percent(busy.reduce((a, b) => a + b, 0) / busy.length), "of the time"] : null,
      job.sent_bytes ? ["Sent", bytes(job.sent_bytes), "by all"] : null,
      job.received_bytes ? ["Received", bytes(job.received_bytes), "by all"] : null,
    ].filter(Boolean);
    this.tiles.hidden = isProgram(job) || job.state === "waiting" || tiles.length < 2;
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
      ["Sent", bytes(job.sent_bytes), "by all"],
    ]);
  }

  // One sentence, instead of an empty page.
  #unknown() {
    const known = this.store.jobs.size ? "It may have been deleted." : "No job has run yet.";
    fill(this.reason, `There is no job named ${this.job}. ${known} `, link("#/jobs", "All jobs"));
    setText(this.progressText, "");
    this.tabs.hidden = this.place.hidden = this.progress.hidden = true;
    this.state.hidden = true;
  }

  #fillTiles(tiles) {
    fill(this.tiles, ...tiles.map(([name, value, note]) => element("div", null,
      element("dt", null, name), element("dd", null, element("span", { class: "value" }, value), note ? element("small", null, ` ${note}`) : null))));
  }

  close() { this.part?.close(); }
}
