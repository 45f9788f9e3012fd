// One node: hardware, owner's policy, processes, and history.

import { nodeButtons } from "../lib/actions.js";
import { Chart, dates } from "../lib/charts.js";
import { bar, element, facts, fill, link, pill, setText } from "../lib/dom.js";
import { age, bits, bytes, count, milliseconds, NONE, percent, short } from "../lib/format.js";
import { get } from "../lib/client.js";
import { nodeReason, nodeState } from "../lib/store.js";

const RANGES = [["hour", 3600], ["day", 86400], ["week", 7 * 86400], ["month", 31 * 86400]];
const REFRESH_MS = 15000;
const FIGURES = [
  ["cpu_percent", "Processors", 1, "%", "--series-0"],
  ["memory_percent", "Memory", 1, "%", "--series-2"],
  ["gpu_percent", "Accelerator", 1, "%", "--series-5"],
  ["latency_ms", "Latency", 1, "ms", "--series-1"],
  ["up_bps", "Up", 1e-6, "Mbit/s", "--series-6"],
  ["down_bps", "Down", 1e-6, "Mbit/s", "--series-4"],
  ["battery_percent", "Battery", 1, "%", "--series-3"],
  ["disk_free_bytes", "Disk free", 1e-9, "GB", "--series-7"],
];

export class NodePanel {
  constructor(store, name) {
    this.store = store;
    this.name = name;
    this.range = 3600;
    this.charts = new Map();
    this.state = element("span", { class: "pill" });
    this.buttons = element("div", { class: "actions" });
    this.facts = element("div");
    this.figures = element("select", { id: "node-figure", change: () => this.#load() },
      ...FIGURES.map(([key, text]) => element("option", { value: key }, text)));
    this.ranges = element("select", { id: "node-range", change: (event) => { this.range = Number(event.target.value); this.#load(); } },
      ...RANGES.map(([text, seconds]) => element("option", { value: seconds }, `last ${text}`)));
    this.chart = new Chart({ id: "node-chart", title: "Processors", legend: false, zero: true, format: short });
    this.element = element("div", { class: "node-panel" },
      element("div", { class: "head" }, element("h2", { id: "node-title" }, name), this.state,
        element("span", { class: "space" }), link("#/fleet", "close", { class: "quiet" })),
      this.buttons, this.facts);
    this.past = element("section", { class: "card", "aria-labelledby": "past-title" },
      element("div", { class: "head" }, element("h2", { id: "past-title" }, `Past of ${name}`),
        element("span", { class: "space" }),
        element("label", { class: "filter" }, element("span", { class: "hidden" }, "Figure"), this.figures),
        element("label", { class: "filter" }, element("span", { class: "hidden" }, "Time range"), this.ranges)),
      this.chart.element);
    this.timer = setInterval(() => this.#load(), REFRESH_MS);
    this.#load();
  }

  close() {
    clearInterval(this.timer);
    this.chart.close();
  }

  update() {
    const node = this.store.nodes.get(this.name);
    if (!node) {
      fill(this.facts, element("p", { class: "empty" }, "Unknown node."));
      this.buttons.replaceChildren();
      return;
    }
    const state = nodeState(node);
    this.state.className = pill(state).className;
    setText(this.state, state);
    const signature = `${node.draining}/${node.state}/${this.store.operator}`;
    if (signature !== this.signature) {
      this.signature = signature;
      this.buttons.replaceChildren(...nodeButtons(this.store, node));
    }
    fill(this.facts, facts(pairs(node, this.store)));
  }

  async #load() {
    const now = Date.now() / 1000;
    const found = await get("api/history", {
      owner: `node/${this.name}`, from: now - this.range, to: now, points: 300,
    });
    const [key, text, scale, unit, color] = FIGURES.find(([name]) => name === this.figures.value);
    const series = found?.series?.[key];
    this.chart.rename(text);
    setText(this.chart.note, series ? `${unit}, in steps of ${step(found.bucket_s)}` : "no history yet");
    const scaled = (values) => values.map((value) => (value == null ? null : value * scale));
    this.chart.draw(series ? [{
      owner: key, x: dates(found.times), y: scaled(series.mean), low: scaled(series.min),
      high: scaled(series.max), color: `var(${color})`,
    }] : [], [], "time", dates([now - this.range, now]));
  }
}

function step(seconds) {
  return { 10: "10 s", 60: "1 min", 600: "10 min", 3600: "1 h" }[seconds] ?? `${seconds} s`;
}

function pairs(node, store) {
  const { info, stats, state } = node;
  const here = state === "online";
  const offer = info.offer;
  const moving = store.rates.get(node.node);
  const alarms = store.alarms.filter((alarm) => alarm.node === node.node);
  const limits = offer && [
    offer.cores ? `${offer.cores} cores` : "", offer.memory_bytes ? bytes(offer.memory_bytes) : "",
    offer.upload_bps ? `${bits(offer.upload_bps)} up` : "", offer.download_bps ? `${bits(offer.download_bps)} down` : "",
  ].filter(Boolean).join(", ");
  return [
    nodeReason(node) ? ["Why", nodeReason(node)] : null,
    alarms.length ? ["Alarms", element("ul", { class: "plain bad" }, ...alarms.map(({ cause, kind }) => element("li", null, cause || kind)))] : null,
    ["Runs", node.running.length
      ? element("ul", { class: "plain" }, ...node.running.map((name) => element("li", null, link(`#/jobs/${encodeURIComponent(name.split("/")[0])}`, name))))
      : "nothing"],
    ["Tokens/s", node.tokens_per_s ? count(node.tokens_per_s) : NONE],
    ["Machine", [info.system, `${info.cores || "?"} cores`, info.memory_bytes ? bytes(info.memory_bytes) : "", info.gpu ? `${info.gpus || 1} × ${info.gpu}${info.gpu_memory_bytes ? ` (${bytes(info.gpu_memory_bytes)})` : ""}` : "no GPU"].filter(Boolean).join(", ")],
    ["Computes on", info.computes_on || info.gpu || "not tried"],
    info.idle ? ["Idle", element("span", { class: "bad", id: "node-idle" }, info.idle)] : null,
    ["Host", `${info.hostname} · atoll ${info.atoll || "?"} · Python ${info.python || "?"}${info.torch ? ` · torch ${info.torch}` : ""}`],
    ["Takes", `${info.slots} at once, as ${(info.launchers ?? ["process"]).join(" or ")}`],
    here ? ["CPU", bar(stats.cpu_percent)] : null,
    here ? ["Memory", bar(stats.memory_percent, { text: stats.memory_percent == null ? null : `${percent(stats.memory_percent)}${stats.memory_free_bytes ? `, ${bytes(stats.memory_free_bytes)} free` : ""}` })] : null,
    here && stats.gpu_percent != null ? ["GPU", bar(stats.gpu_percent, { text: `${percent(stats.gpu_percent)}${stats.gpu_memory_used_bytes ? `, ${bytes(stats.gpu_memory_used_bytes)} in use` : ""}` })] : null,
    here && stats.battery_percent != null ? ["Battery", `${percent(stats.battery_percent)}, ${stats.on_battery ? "on battery" : "plugged in"}`] : null,
    here ? ["Link", [milliseconds(stats.latency_ms), `${bits(stats.up_bps)} up`, `${bits(stats.down_bps)} down`, stats.reconnects ? `${stats.reconnects} reconnects` : ""].filter(Boolean).join(", ")] : null,
    moving ? ["Traffic now", `${bytes(moving.up)}/s up, ${bytes(moving.down)}/s down`] : null,
    ["Traffic in all", `${bytes(node.sent_bytes)} sent, ${bytes(node.received_bytes)} received by its jobs`],
    offer ? ["Owner allows", element("ul", { class: "plain" }, ...((offer.text?.length ? offer.text : ["everything, at any time"]).map((line) => element("li", null, line))))] : null,
    limits ? ["Limits", limits] : null,
    offer?.kinds ? ["Kinds of job", offer.kinds.join(", ")] : null,
    offer?.labels?.length ? ["Labels", offer.labels.join(", ")] : null,
    ["Last seen", age(node.last_seen_s)],
  ];
}
