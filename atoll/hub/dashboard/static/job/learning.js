// Overview of an RL job: returns, critic, and events.

import { Chart, ChartGroup, dates, shade } from "../lib/charts.js";
import { card, drawn, element, empty, fill, link, pill } from "../lib/dom.js";
import { eventLine } from "../lib/event_line.js";
import { bytes, count, duration, loss, NONE } from "../lib/format.js";
import { get, path } from "../lib/client.js";
import { criticOf, policiesOf } from "../lib/learning_curves.js";
import { memberState } from "../lib/store.js";
import { MetricChart } from "../lib/metric_chart.js";
import { Table } from "../lib/table.js";

const CHARTS = [
  ["explained-chart", "Explained variance", "of the variance of returns", "explained_variance", {}],
  ["critic-chart", "Loss of the critic", "of each policy's values", "value_loss", { zero: true }],
  ["steps-chart", "Speed", "environment steps per second", "env_steps_per_s", { zero: true, format: count }],
];
const AXES = [["step", "steps"], ["time", "time"]];
const REDRAW_MS = 900;
const FILES_MS = 5000;
const SHOWN_EVENTS = 200;
const MOST_PANELS = 8;

export class LearningPart {
  constructor(store, data) {
    this.store = store;
    this.data = data;
    this.axis = "step";
    this.drawnAt = -Infinity;
    this.group = new ChartGroup();
    this.charts = CHARTS.map(([id, title, note, kind, options]) => [new Chart({ id, title, unit: note, group: this.group, ...options }), kind]);
    this.policies = new Table({ label: "Policies", columns: POLICIES, key: (row) => row.policy, cards: true });
    this.critic = new Table({ label: "Critic", columns: CRITIC, key: (row) => row.member, cards: true });
    this.criticCard = card("Critic", this.critic.element,
      element("p", { class: "quiet" }, link("#/queues", "Queues and topics"), " show what waits between actors and critic."));
    this.episodes = element("div", { class: "episodes" });
    this.episodesCard = card("Episodes", element("p", { class: "quiet" }, "One of each policy at its end, always its most likely action."), this.episodes);
    this.episodesCard.hidden = true;
    this.metric = new MetricChart(data, this.group, ["return", ...CHARTS.map(([, , , kind]) => kind)]);
    this.events = element("ol", { class: "events", tabindex: "0", "aria-label": "Events of the job" });
    this.element = element("div", { class: "stackview" },
      card("Policies", this.policies.element), this.criticCard, this.episodesCard,
      element("section", { class: "card", "aria-labelledby": "curves-title" },
        element("div", { class: "head" }, element("h2", { id: "curves-title" }, "Curves"),
          element("span", { class: "quiet" }, "drag to zoom all"),
          element("span", { class: "space" }), ...this.group.tools,
          element("label", { class: "filter" }, "against ", element("select", {
            id: "axis", change: (event) => { this.axis = event.target.value; this.drawnAt = -Infinity; this.data.changed.points = true; this.update(); },
          }, ...AXES.map(([value, text]) => element("option", { value }, text))))),
        this.returns = element("div", { class: "charts panels" }),
        element("div", { class: "charts three" }, ...this.charts.map(([chart]) => chart.element)),
        this.metric.element),
      card("Events", this.events));
    this.timer = setInterval(() => this.#load(), FILES_MS);
    this.#load();
  }

  update() {
    const job = this.data.view;
    const policies = policiesOf(job);
    this.policies.show(policies.map((policy) => this.#row(policy)));
    const critic = criticOf(job);
    this.criticCard.hidden = !critic;
    if (critic) this.critic.show([{ ...critic }]);
    if (this.data.take("events")) {
      this.#showEvents();
      const recorded = this.data.events.filter(({ kind }) => kind === "episode").length;
      if (recorded !== this.recorded) { this.recorded = recorded; this.#load(); }
    }
    const now = performance.now();
    if (this.data.changed.points && now - this.drawnAt > REDRAW_MS) {
      this.data.take("points");
      this.drawnAt = now;
      this.#draw(policies);
    }
  }

  #draw(policies) {
    this.panels ??= this.#panels(policies);
    for (const [chart, own] of this.panels) chart.draw(own(policies).flatMap((policy) => this.#traces(policy, "return")), [], envAxis(this.axis));
    for (const [chart, kind] of this.charts) {
      const own = policies.flatMap((policy) => this.#traces(policy, kind));
      chart.draw([...own, ...(kind === "value_loss" ? this.#foreign(policies) : [])], [], kind === "value_loss" ? "update" : envAxis(this.axis));
    }
    this.metric.draw(this.axis);
  }

  // Returns of the same environment share a chart; different ones have their own scale.
  #panels(policies) {
    const apart = policies.length <= MOST_PANELS && new Set(policies.map(({ env }) => shortEnv(env))).size > 1;
    const panels = apart
      ? policies.map(({ policy, env }, place) => [
        new Chart({ id: `return-chart-${place}`, title: `Return of ${policy}`, unit: shortEnv(env), group: this.group }), (all) => [all[place]],
      ])
      : [[new Chart({ id: "return-chart", title: "Return", unit: "mean of each policy's last episodes", group: this.group }), (all) => all]];
    this.returns.style.setProperty("--panels", Math.min(4, panels.length));
    this.returns.append(...panels.map(([chart]) => chart.element));
    return panels;
  }

  #traces({ policy, members, at }, kind) {
    const actors = members.map(({ member }) => member);
    // The critic of a pool prefixes policies with their job; without one each actor reports its
    // own.
    const shared = kind === "value_loss" && [policy, `${this.data.name}.${policy}`].find((name) => this.data.learning.of(kind, name));
    const owners = shared ? [shared] : actors;
    const curves = owners.map((owner) => this.data.learning.of(kind, owner)).filter(Boolean);
    return curves.map((curve) => ({
      owner: curves.length > 1 ? `${policy} ${curve.owner}` : policy, color: shade(at),
      x: this.axis === "time" && kind !== "value_loss" ? dates(curve.time) : curve.step,
      y: kind === "explained_variance" ? curve.y.map((value) => Math.max(-1, value)) : curve.y,
    }));
  }

  // Value losses of the critic of a pool on policies of other jobs.
  #foreign(policies) {
    const known = new Set(policies.flatMap(({ policy, members }) => [policy, `${this.data.name}.${policy}`, ...members.map(({ member }) => member)]));
    return this.data.learning.owners("value_loss").filter((owner) => !known.has(owner)).map((owner, at) => {
      const { step, y } = this.data.learning.of("value_loss", owner);
      return { owner, color: shade(policies.length + at), x: step, y };
    });
  }

  // Combined reports of the actors of a policy.
  #row({ policy, env, steps, at, members }) {
    const known = (name) => members.map(({ values }) => values?.[name]).filter((value) => value != null);
    const sum = (name) => known(name).reduce((a, b) => a + b, 0);
    const mean = (name) => (known(name).length ? sum(name) / known(name).length : null);
    const newest = (name) => (known(name).length ? Math.max(...known(name)) : null);
    const curve = members.map(({ member }) => this.data.learning.of("return", member)).find(Boolean);
    return {
      policy, env, steps, at, members, curve: curve?.y ?? [], now: mean("return"), best: newest("return_best"),
      done: sum("env_steps"), speed: members.some(({ state }) => state === "running") ? sum("env_steps_per_s") : null,
      episodes: sum("episodes"), version: newest("value_version"), age: newest("value_age_s"),
      waited: known("queue_wait_s").length ? sum("queue_wait_s") : null, sent: sum("sent_bytes"), dropped: sum("dropped"),
    };
  }

  async #load() {
    const files = await get(path("jobs", this.data.name, "files"));
    const order = (this.data.view?.roles ?? []).map(({ policy }) => `episodes/${policy}.gif`);
    const found = (files ?? []).filter(({ name }) => order.includes(name))
      .sort((a, b) => order.indexOf(a.name) - order.indexOf(b.name));
    const signature = found.map(({ name, modified }) => `${name} ${modified}`).join("\n");
    if (!found.length || signature === this.signature) return;
    this.signature = signature;
    this.episodesCard.hidden = false;
    const job = path("jobs", this.data.name, "files");
    fill(this.episodes, ...found.map(({ name, modified }) => {
      const policy = name.slice("episodes/".length, -".gif".length);
      const address = `${job}/episodes/${encodeURIComponent(`${policy}.gif`)}?${modified}`;
      return element("figure", null, element("img", { src: address, alt: `An episode of ${policy}`, loading: "lazy" }),
        element("figcaption", null, policy));
    }));
  }

  #showEvents() {
    const newest = this.data.events.slice(-SHOWN_EVENTS).reverse();
    fill(this.events, ...(newest.length ? newest.map((event) => eventLine(event, { view: this.data.view })) : [element("li", null, empty("Nothing yet."))]));
  }

  close() {
    clearInterval(this.timer);
    this.metric.close();
    for (const [chart] of [...this.charts, ...(this.panels ?? [])]) chart.close();
  }
}

const envAxis = (axis) => (axis === "step" ? "env_step" : axis);

// A return with the significant digits only.
export function score(value) {
  if (value == null) return NONE;
  const size = Math.abs(value);
  return size >= 100 ? Math.round(value).toLocaleString("en") : value.toFixed(size >= 10 ? 1 : 2);
}

// Environment name without its module.
function shortEnv(env) {
  return env.startsWith("text:") ? env : env.split(":").at(-1);
}

// State of a policy: the worst of its actors.
function policyState({ members }) {
  const states = members.map(memberState);
  return states.find((state) => state !== "running" && state !== "done") ?? states[0] ?? "waiting";
}

function criticAge({ version, age, members }) {
  if (version == null) return NONE;
  const silent = age > 8 && members.some(({ state }) => state === "running");
  return silent ? element("span", { class: "bad" }, `v${count(version)}, silent ${duration(age)}`) : `v${count(version)}`;
}

// A sparkline, scaled from lowest to highest.
function spark({ curve, at, policy }) {
  const points = curve.filter((_, place) => place % Math.ceil(curve.length / 60) === 0 || place === curve.length - 1);
  if (points.length < 2) return NONE;
  const low = Math.min(...points), span = Math.max(...points) - low || 1;
  const place = (value, index) => `${((100 * index) / (points.length - 1)).toFixed(1)},${(19 - (18 * (value - low)) / span).toFixed(1)}`;
  const line = drawn("polyline", { points: points.map(place).join(" ") });
  line.style.stroke = `var(--series-${at % 8})`;
  const label = `Return of ${policy} from ${score(curve[0])} to ${score(curve.at(-1))}`;
  return drawn("svg", { class: "spark", viewBox: "0 0 100 20", preserveAspectRatio: "none", role: "img" }, drawn("title", null, label), line);
}

const POLICIES = [
  { name: "Policy", align: "first", value: ({ policy, at }) => { const swatch = element("span", { class: "swatch" }); swatch.style.background = `var(--series-${at % 8})`; return element("span", { class: "named" }, swatch, element("b", null, policy)); }, sort: ({ policy }) => policy },
  { name: "Environment", align: "wrap", value: ({ env }) => element("span", { title: env }, shortEnv(env)), sort: ({ env }) => env },
  { name: "State", value: (row) => pill(policyState(row)) },
  { name: "Return", align: "right", value: ({ now }) => element("b", null, score(now)), sort: ({ now }) => now },
  { name: "Best", align: "right", value: ({ best }) => score(best), sort: ({ best }) => best },
  { name: "So far", value: spark },
  { name: "Steps", align: "right", value: ({ done, steps }) => `${count(done)} of ${count(steps)}`, sort: ({ done }) => done },
  { name: "Steps/s", align: "right", value: ({ speed }) => count(speed), sort: ({ speed }) => speed },
  { name: "Episodes", align: "right", value: ({ episodes }) => count(episodes), sort: ({ episodes }) => episodes },
  { name: "Critic", align: "right", value: criticAge, sort: ({ version }) => version },
  { name: "Waited", align: "right", hint: "Seconds it waited for space in its queue", value: ({ waited }) => (waited == null ? NONE : duration(waited)), sort: ({ waited }) => waited },
  { name: "Sent", align: "right", value: ({ sent }) => bytes(sent), sort: ({ sent }) => sent },
  { name: "Dropped", align: "right", hint: "Trajectories that were not learned from", value: ({ dropped }) => count(dropped), sort: ({ dropped }) => dropped },
  { name: "On", value: ({ members }) => element("span", null, ...members.flatMap(({ node }, at) => [at ? ", " : null, link(`#/fleet/${encodeURIComponent(node)}`, node)])) },
];

const figure = (name) => ({ values }) => values?.[name];

const CRITIC = [
  { name: "Machine", align: "first", value: ({ node }) => link(`#/fleet/${encodeURIComponent(node)}`, node) },
  { name: "State", value: (row) => pill(memberState(row)) },
  { name: "Version", align: "right", value: (row) => count(figure("value_version")(row) ?? figure("updates")(row)) },
  { name: "Trajectories", align: "right", value: (row) => count(figure("trajectories")(row)) },
  { name: "Per second", align: "right", value: (row) => count(figure("trajectories_per_s")(row)) },
  { name: "Loss", align: "right", value: (row) => loss(figure("value_loss")(row)) },
  { name: "Queued", align: "right", hint: "Trajectories that wait for it", value: (row) => count(figure("queue_depth")(row)) },
  { name: "Staleness", align: "right", hint: "Updates that policies were ahead of what it learned from last", value: (row) => { const age = figure("staleness")(row); return age == null ? NONE : age.toFixed(1); } },
  { name: "Dropped", align: "right", value: (row) => count(figure("dropped")(row)) },
  { name: "An update takes", align: "right", value: (row) => duration(figure("update_s")(row)) },
  { name: "Sent", align: "right", value: (row) => bytes(row.sent_bytes) },
];
