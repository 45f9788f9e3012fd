// The page's state of the hub: ticks merged into full rows.

const RATE_OVER_S = 3;
const MAX_EVENTS = 1000;

export class Store {
  constructor() {
    this.time = 0;
    this.number = 0; // of the hub's snapshot that the rows are of
    this.hub = { role: "", version: "", uptime_s: 0, rss_bytes: 0 };
    this.nodes = new Map();
    this.jobs = new Map();
    this.alarms = [];
    this.queues = [];
    this.events = [];
    this.rates = new Map(); // node -> {up, down} in bytes per second, from counters
    this.counters = new Map();
  }

  get operator() { return this.hub.role === "operator"; }

  apply(tick) {
    this.time = tick.time;
    this.number = tick.number;
    if (tick.hub) this.hub = tick.hub;
    if (tick.full) {
      this.nodes = new Map(tick.nodes.map((row) => [row.node, row]));
      this.jobs = new Map(tick.jobs.map((row) => [row.job, row]));
      this.events = [];
    } else {
      merge(this.nodes, "node", tick.nodes, tick.gone?.nodes);
      merge(this.jobs, "job", tick.jobs, tick.gone?.jobs);
    }
    if (tick.alarms) this.alarms = tick.alarms;
    if (tick.queues) this.queues = tick.queues;
    if (tick.hub_events?.length) this.events = [...this.events, ...tick.hub_events].slice(-MAX_EVENTS);
    for (const node of this.nodes.values()) this.#measure(node);
  }

  #measure({ node, stats, sent_bytes, received_bytes }) {
    const sent = (stats?.sent_bytes ?? 0) + sent_bytes, received = (stats?.received_bytes ?? 0) + received_bytes;
    const before = this.counters.get(node);
    if (before && this.time - before.time < RATE_OVER_S) return;
    if (before && sent >= before.sent && received >= before.received) {
      const seconds = this.time - before.time;
      this.rates.set(node, {
        up: (sent - before.sent) / seconds, down: (received - before.received) / seconds,
      });
    }
    this.counters.set(node, { time: this.time, sent, received });
  }

  // Jobs in the hub's order: newest first.
  jobList() { return [...this.jobs.values()].sort((a, b) => b.created - a.created); }

  nodeList() {
    return [...this.nodes.values()].sort((a, b) => a.node.localeCompare(b.node, "en", { numeric: true }));
  }
}

function merge(rows, key, changed = [], gone = []) {
  for (const name of gone) rows.delete(name);
  for (const row of changed) rows.set(row[key], { ...rows.get(row[key]), ...row });
}

// ---------------------------------------------------------------------- states as one word

export const nodeState = (node) => node.shown;

// The machine of a member, by the name that people gave it.
export function machineOf(job, member) {
  return job?.members?.find((one) => one.member === member)?.node || member;
}

// The same, with the member where that machine has several.
export function nameOf(job, member) {
  const machine = machineOf(job, member);
  const several = machine !== member && job.members.filter(({ node }) => node === machine).length > 1;
  return several ? `${machine} (${member})` : machine;
}

// Why a node takes no work, if so.
export function nodeReason(node) {
  return node.info.offer?.paused || node.drain_reason || "";
}

export function jobState(job) {
  if (job.state !== "running") return job.state;
  if (job.stopping) return "stopping";
  return job.paused ? "paused" : job.state;
}

// Nodes of a job: those that train, of those wanted; after its end those that did.
export function nodesOf(job) {
  if (job.state === "waiting") return String(job.nodes_wanted);
  const wanted = job.nodes_wanted;
  return job.state === "running" ? `${job.members_running} of ${wanted}` : String(job.members_placed || wanted);
}

// State of a member: its state in rounds is more specific than that of its process.
export function memberState(member) {
  if (member.state !== "running") return member.state;
  return { recovering: "recovering", away: "silent" }[member.round_state] ?? member.state;
}

// Whether a job is a program that need not train: it shows its output, and no curves.
export const isProgram = ({ kind, committed_round: rounds }) => (kind === "command" || kind === "container") && !rounds;

// A job's name without the time, for narrow tables.
export function shortJob(job) {
  return job.replace(/-\d{8}-\d{6}/, "");
}

export function problem({ reason, error }) {
  const given = /^w\d+$/.test(error?.given ?? "") ? "" : error?.given; // a member: its machine is in the reason
  return [reason, error?.what, given, error?.remedy]
    .filter((part, at, all) => part && !all.slice(0, at).some((said) => said?.includes(part))).join(" · ");
}
