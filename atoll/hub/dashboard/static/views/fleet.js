// Fleet: map, totals, and a row per node.

import { bar, card, element, empty, facts, fill, link, pill, setText } from "../lib/dom.js";
import { age, bits, bytes, count, milliseconds, NONE, plural, rate } from "../lib/format.js";
import { AddMachine } from "./add_machine.js";
import { FleetMap } from "./map.js";
import { NodePanel } from "./node.js";
import { nodeReason, nodeState, shortJob } from "../lib/store.js";
import { Table } from "../lib/table.js";

const SHOWN_RUNS = 2;
const LOW_BYTES = 5e9, FULL_BYTES = 2e8; // on a disk; below the second the alarm is critical
const FILTERS = ["all", "online", "paused", "draining", "drained", "left", "lost"];

export class FleetView {
  constructor(store, { parts: [chosen = ""] }) {
    this.store = store;
    this.chosen = chosen;
    this.title = chosen || "Cluster";
    this.filter = "";
    this.wanted = "all";
    this.map = new FleetMap();
    this.side = element("section", { class: "card side" });
    this.panel = null;
    this.total = element("span", { class: "quiet" });
    this.table = new Table({
      label: "Nodes", columns: columns(store), key: (row) => row.node, cards: true, sortBy: "Node",
      rowClass: (row) => `${nodeState(row)}${row.node === this.chosen ? " chosen" : ""}`,
    });
    this.none = empty("No machine yet.");
    this.adding = null;
    this.invitation = element("section", { class: "card", "aria-labelledby": "add-title", hidden: "" },
      element("h2", { id: "add-title" }, "Add a machine"));
    this.past = element("div", { class: "past" });
    const left = element("div", { class: "stackview" }, card("Map", this.map.element), this.past);
    this.list = element("section", { class: "card", "aria-labelledby": "nodes-title" },
      element("div", { class: "head" },
        element("h2", { id: "nodes-title" }, "Nodes"), this.total, element("span", { class: "space" }),
        element("label", { class: "filter" }, element("span", { class: "hidden" }, "State of nodes"),
          element("select", { id: "node-state", change: (event) => { this.wanted = event.target.value; this.update(); } },
            ...FILTERS.map((name) => element("option", { value: name }, name === "all" ? "all states" : name)))),
        element("label", { class: "filter" }, element("span", { class: "hidden" }, "Search nodes"),
          element("input", {
            id: "node-search", type: "search", placeholder: "Search nodes", "data-search": "",
            input: (event) => { this.filter = event.target.value.toLowerCase(); this.update(); },
          }))),
      this.none, this.table.element);
    this.element = element("div", { class: "view fleet" },
      this.invitation,
      this.split = element("div", { class: "split" }, left, this.side), this.list);
    this.#openSide();
  }

  // Selecting another node in the same view only rebuilds the panel.
  go({ parts: [chosen = ""] }) {
    if (chosen === this.chosen) return true;
    this.chosen = chosen;
    this.title = chosen || "Cluster";
    this.#openSide();
    this.update();
    return true;
  }

  #openSide() {
    this.panel?.close();
    this.panel = this.chosen ? new NodePanel(this.store, this.chosen) : null;
    this.summary = this.panel ? null : element("div", { class: "summary" });
    this.past.replaceChildren(...(this.panel ? [this.panel.past] : []));
    this.side.replaceChildren(this.panel?.element
      ?? element("div", null, element("h2", null, "All together"), this.summary));
  }

  update() {
    const nodes = this.store.nodeList();
    this.map.show(nodes, this.chosen);
    const online = nodes.filter((node) => node.state === "online");
    setText(this.total, nodes.length ? `${online.length} of ${nodes.length} online` : "");
    this.none.hidden = nodes.length > 0;
    this.table.element.hidden = nodes.length === 0;
    this.split.hidden = !nodes.length && !this.chosen; // nothing to draw or to add up
    this.list.hidden = !nodes.length && this.store.operator; // the invitation says it
    this.table.show(nodes.filter((node) => this.#isWanted(node)));
    this.#invite(nodes);
    this.panel?.update();
    if (this.summary) fill(this.summary, ...summary(nodes, online, this.store));
  }

  // A cluster of at most one machine asks for the next; the card stays while this view is open.
  #invite(nodes) {
    if (!this.adding && this.store.operator && nodes.length <= 1) {
      this.adding = new AddMachine(this.store);
      this.invitation.append(this.adding.element);
      this.invitation.hidden = false;
    }
    this.adding?.update();
  }

  #isWanted(node) {
    if (this.wanted !== "all" && nodeState(node) !== this.wanted) return false;
    const text = [node.node, node.name, node.info.gpu, ...node.running, ...(node.info.offer?.labels ?? [])];
    return !this.filter || text.join(" ").toLowerCase().includes(this.filter);
  }

  close() {
    this.map.close();
    this.panel?.close();
    this.adding?.close();
  }
}

function summary(nodes, online, store) {
  const sum = (value) => online.reduce((total, node) => total + (value(node) ?? 0), 0);
  const states = new Map();
  for (const node of nodes) states.set(nodeState(node), (states.get(nodeState(node)) ?? 0) + 1);
  const gpus = sum(({ info }) => info.gpus || (info.gpu ? 1 : 0));
  const load = online.filter(({ stats }) => stats.cpu_percent != null);
  const cpu = load.length ? load.reduce((all, { stats }) => all + stats.cpu_percent, 0) / load.length : null;
  const up = sum(({ node }) => store.rates.get(node)?.up), down = sum(({ node }) => store.rates.get(node)?.down);
  const versions = new Set(online.map(({ info }) => info.atoll).filter(Boolean));
  const jobs = [...store.jobs.values()].filter(({ state }) => state === "running").length;
  return [
    facts([
      ["Nodes", [...states].sort().map(([state, number]) => element("span", { class: "pair" }, pill(state), ` ${number} `))],
      ["Running jobs", String(jobs)],
      ["Tokens/s", count(sum((node) => node.tokens_per_s))],
      ["Cores", `${count(sum(({ info }) => info.cores))}${gpus ? ` and ${plural(gpus, "GPU")}` : ""}`],
      ["Processors", bar(cpu)],
      ["Memory", bytes(sum(({ info }) => info.memory_bytes))],
      ["Traffic now", `${rate(up)} up, ${rate(down)} down`],
      ["Alarms", store.alarms.length ? link("#/events", plural(store.alarms.length, "open alarm")) : "All clear"],
      versions.size > 1 ? ["Versions", element("span", { class: "warn" }, [...versions].sort().join(", "))] : null,
    ]),
  ];
}

function columns(store) {
  const stat = (name) => (node) => (node.state === "online" ? node.stats[name] : null);
  const level = (name, label) => ({
    name: label, value: (node) => bar(stat(name)(node)), sort: stat(name), optional: true,
  });
  return [
    { name: "Node", value: (node) => link(`#/fleet/${encodeURIComponent(node.node)}`, node.node), sort: (node) => node.node, align: "first" },
    { name: "State", value: (node) => stateCell(node), sort: nodeState },
    level("cpu_percent", "CPU"),
    level("gpu_percent", "GPU"),
    level("memory_percent", "Memory"),
    { name: "Disk free", align: "right", value: (node) => diskCell(node), sort: stat("disk_free_bytes") },
    { name: "Battery", value: (node) => batteryCell(node), sort: stat("battery_percent"), optional: true },
    { name: "Latency", align: "right", value: (node) => milliseconds(stat("latency_ms")(node)), sort: stat("latency_ms") },
    { name: "Up / down", align: "right", value: speedCell, sort: stat("up_bps"), hint: "measured speed of its link" },
    { name: "Tokens/s", align: "right", value: (node) => (node.tokens_per_s ? count(node.tokens_per_s) : NONE), sort: (node) => node.tokens_per_s },
    { name: "Runs", align: "runs", value: (node) => runsCell(node) },
    { name: "Owner allows", align: "policy", value: (node) => policyCell(node) },
    { name: "Version", value: (node) => versionCell(node, store), sort: ({ info }) => info.atoll },
    { name: "Last seen", value: (node) => age(node.last_seen_s), sort: (node) => node.last_seen_s },
  ];
}

function stateCell(node) {
  const reason = nodeReason(node);
  return element("span", { class: "stack" }, pill(nodeState(node)),
    reason ? element("small", { class: "quiet" }, reason) : null);
}

function diskCell({ state, stats, info }) {
  const free = state === "online" ? stats.disk_free_bytes ?? info.disk_free_bytes : null;
  return element("span", { class: free > 0 && free < FULL_BYTES ? "bad" : free > 0 && free < LOW_BYTES ? "warn" : null }, free ? bytes(free) : NONE);
}

function batteryCell({ state, stats }) {
  if (state !== "online" || stats.battery_percent == null) return element("span", { class: "quiet" }, NONE);
  return bar(stats.battery_percent, {
    text: `${Math.round(stats.battery_percent)} %${stats.on_battery ? "" : " ⚡"}`,
    name: stats.on_battery ? "runs on its battery" : "plugged in",
  });
}

function speedCell({ state, stats }) {
  if (state !== "online" || !(stats.up_bps || stats.down_bps)) return NONE;
  const [up, unit] = bits(stats.up_bps).split(" "), [down, other] = bits(stats.down_bps).split(" ");
  return unit === other ? `${up} / ${down} ${unit}` : `${up} ${unit ?? ""} / ${down} ${other ?? ""}`;
}

function runsCell({ running }) {
  if (!running.length) return element("span", { class: "quiet" }, "nothing");
  const jobs = new Map();
  for (const name of running) jobs.set(name.split("/")[0], [...jobs.get(name.split("/")[0]) ?? [], name]);
  const shown = [...jobs].slice(0, SHOWN_RUNS).map(([job, names]) => element("li", null,
    link(`#/jobs/${encodeURIComponent(job)}`, shortJob(job), { title: names.join("\n") }), names.length > 1 ? ` × ${names.length}` : ""));
  const more = jobs.size - SHOWN_RUNS;
  return element("ul", { class: "plain" }, ...shown,
    more > 0 ? element("li", { class: "quiet", title: [...jobs.keys()].slice(SHOWN_RUNS).join("\n") }, `and ${more} more`) : null);
}

function policyCell({ info }) {
  const lines = info.offer?.text ?? [];
  if (!lines.length) return element("span", { class: "quiet" }, info.offer ? "everything" : NONE);
  return element("span", { title: lines.join("\n") }, lines.join(" · "));
}

function versionCell({ info }, store) {
  if (!info.atoll) return element("span", { class: "quiet" }, NONE);
  const other = store.hub.version && info.atoll !== store.hub.version;
  return element("span", { class: other ? "warn" : null, title: other ? `the hub is ${store.hub.version}` : null },
    other ? `${info.atoll} ≠ hub` : info.atoll);
}
