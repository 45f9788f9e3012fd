// The fleet as a drawing: the hub in the centre, nodes around it, line width by link speed.

import { drawn, element, set, setText } from "../lib/dom.js";
import { bits, milliseconds } from "../lib/format.js";
import { nodeReason, nodeState } from "../lib/store.js";

const LABELLED = 24; // with more nodes, names are shown on hover only
const SHAPES = {
  online: "M-7,0a7,7 0 1,0 14,0a7,7 0 1,0 -14,0",
  idle: "M-6,0a6,6 0 1,0 12,0a6,6 0 1,0 -12,0",
  paused: "M-6,-7h4.5v14h-4.5zM1.5,-7h4.5v14h-4.5z",
  draining: "M-8,-6h16l-8,14z",
  drained: "M-8,-6h16l-8,14z",
  left: "M-7,-1.5h14v3h-14z",
  lost: "M-7,-4.5l2.5,-2.5 4.5,4.5 4.5,-4.5 2.5,2.5 -4.5,4.5 4.5,4.5 -2.5,2.5 -4.5,-4.5 -4.5,4.5 -2.5,-2.5 4.5,-4.5z",
};
const LEGEND = [
  ["online", "works"], ["idle", "is free"], ["paused", "paused"], ["draining", "drains"], ["drained", "drained"], ["left", "left"], ["lost", "lost"],
];

const kind = (node) => {
  const state = nodeState(node);
  return state === "online" && !node.running.length ? "idle" : state;
};

export class FleetMap {
  constructor() {
    this.links = drawn("g", { class: "links" });
    this.marks = drawn("g", { class: "nodes" });
    this.hub = drawn("g", { class: "hub" }, drawn("circle", { r: 17 }),
      drawn("text", { "text-anchor": "middle", dy: "0.35em" }, "hub"));
    this.svg = drawn("svg", { role: "group", "aria-label": "Map of the fleet" },
      this.links, this.hub, this.marks);
    this.element = element("div", { class: "map" }, this.svg, legend());
    this.known = new Map();
    this.nodes = [];
    this.chosen = "";
    this.focused = "";
    this.svg.addEventListener("keydown", (event) => this.#walk(event));
    this.watcher = new ResizeObserver(() => this.show(this.nodes, this.chosen));
    this.watcher.observe(this.element);
  }

  close() { this.watcher.disconnect(); }

  show(nodes, chosen = "") {
    this.nodes = nodes;
    this.chosen = chosen;
    const width = Math.max(260, this.element.clientWidth);
    const height = Math.round(Math.max(250, Math.min(430, width * 0.62)));
    set(this.svg, { viewBox: `0 0 ${width} ${height}`, height });
    set(this.hub, { transform: `translate(${width / 2} ${height / 2})` });
    const names = new Set(nodes.map(({ node }) => node));
    for (const [name, parts] of this.known) {
      if (!names.has(name)) {
        parts.mark.remove(); parts.line.remove(); parts.label.remove();
        this.known.delete(name);
      }
    }
    if (!names.has(this.focused)) this.focused = nodes[0]?.node ?? "";
    const places = layout(nodes.length, width, height);
    nodes.forEach((node, at) => this.#place(node, places[at], nodes.length));
  }

  #place(node, place, count) {
    const parts = this.known.get(node.node) ?? this.#make(node.node);
    const state = kind(node);
    const { latency_ms: latency, up_bps: up, down_bps: down } = node.stats;
    const speed = Math.max(up ?? 0, down ?? 0);
    const thin = count > 60 ? 0.35 : count > LABELLED ? 0.6 : 1;
    set(parts.line, {
      x1: place.hubX, y1: place.hubY, x2: place.x, y2: place.y, class: `link ${state}`,
      "stroke-width": speed ? (thin * Math.min(8, 1 + 1.5 * Math.log10(1 + speed / 1e6))).toFixed(1) : thin,
    });
    const labelled = count <= LABELLED;
    setText(parts.label, labelled && latency != null && state !== "lost" ? milliseconds(latency) : "");
    set(parts.label, beside(place));
    const own = node.node === this.chosen;
    set(parts.mark, {
      transform: `translate(${place.x.toFixed(1)} ${place.y.toFixed(1)})`,
      class: `node ${state}${own ? " chosen" : ""}`, tabindex: node.node === this.focused ? "0" : "-1",
      "aria-label": describe(node, speed), "aria-current": own ? "true" : null,
    });
    set(parts.shape, { d: SHAPES[state], transform: count > 60 ? "scale(0.8)" : null });
    set(parts.halo, { r: count > 60 ? 9 : 13 });
    setText(parts.title, describe(node, speed));
    const named = labelled || own || state === "lost" && count <= 60;
    setText(parts.name, named ? shortened(node.node) : "");
    set(parts.name, { y: place.y < place.hubY ? -12 : 20 });
  }

  #make(name) {
    const line = drawn("line", {});
    const label = drawn("text", { class: "latency", "text-anchor": "middle" });
    const title = drawn("title", {});
    const shape = drawn("path", {});
    const text = drawn("text", { class: "name", "text-anchor": "middle" });
    const halo = drawn("circle", { class: "halo" });
    const mark = drawn("a", { href: `#/fleet/${encodeURIComponent(name)}`, "data-node": name },
      title, halo, shape, text);
    mark.addEventListener("focus", () => { this.focused = name; });
    this.links.append(line, label);
    this.marks.append(mark);
    const parts = { line, label, title, shape, halo, name: text, mark };
    this.known.set(name, parts);
    return parts;
  }

  // One tab stop; arrow keys move between nodes.
  #walk(event) {
    const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
    const step = steps[event.key];
    if (!step || !this.nodes.length) return;
    event.preventDefault();
    const at = this.nodes.findIndex(({ node }) => node === this.focused);
    const next = this.nodes[(at + step + this.nodes.length) % this.nodes.length].node;
    this.known.get(this.focused)?.mark.setAttribute("tabindex", "-1");
    this.focused = next;
    const { mark } = this.known.get(next);
    mark.setAttribute("tabindex", "0");
    mark.focus();
  }
}

// Positions on rings around the hub, inner ones first.
function layout(count, width, height) {
  const hubX = width / 2, hubY = height / 2;
  const rings = count <= 16 ? 1 : count <= 48 ? 2 : 3;
  const shares = { 1: [1], 2: [0.38, 0.62], 3: [0.22, 0.33, 0.45] }[rings];
  const numbers = shares.map((share, ring) => ring === rings - 1 ? 0 : Math.round(share * count));
  numbers[rings - 1] = count - numbers.reduce((a, b) => a + b, 0);
  return numbers.flatMap((number, ring) => {
    const reach = rings === 1 ? 1 : 0.42 + (0.58 * (ring + 1)) / rings;
    const radiusX = (width / 2 - 46) * reach, radiusY = (height / 2 - 30) * reach;
    return Array.from({ length: number }, (_, at) => {
      const angle = (2 * Math.PI * (at + ring / 2)) / number - Math.PI / 2;
      return { hubX, hubY, x: hubX + radiusX * Math.cos(angle), y: hubY + radiusY * Math.sin(angle) };
    });
  });
}

// Position of a label beside the middle of a link, above or to its right.
function beside({ hubX, hubY, x, y }) {
  const length = Math.hypot(x - hubX, y - hubY) || 1;
  const flat = Math.abs(x - hubX) / length, steep = Math.abs(y - hubY) / length;
  return {
    x: ((hubX + 1.4 * x) / 2.4 + 32 * steep).toFixed(1),
    y: ((hubY + 1.4 * y) / 2.4 - 7 * flat + 4 * steep).toFixed(1),
  };
}

function describe(node, speed) {
  const state = kind(node);
  const words = { online: `works on ${node.running.length}`, idle: "is free" }[state] ?? state;
  return [`${node.node}: ${words}`, nodeReason(node),
    node.stats.latency_ms != null ? milliseconds(node.stats.latency_ms) : "",
    speed ? bits(speed) : ""].filter(Boolean).join(", ");
}

function shortened(name) {
  return name.length > 16 ? `${name.slice(0, 15)}…` : name;
}

function legend() {
  return element("ul", { class: "legend", "aria-label": "Signs of the map" },
    ...LEGEND.map(([state, text]) => element("li", null,
      drawn("svg", { viewBox: "-10 -10 20 20", class: `sign node ${state}`, "aria-hidden": "true" },
        drawn("path", { d: SHAPES[state] })), text)),
    element("li", null, drawn("svg", { viewBox: "0 0 34 10", class: "sign wide", "aria-hidden": "true" },
      drawn("line", { x1: 0, y1: 5, x2: 15, y2: 5, "stroke-width": 1, class: "link" }),
      drawn("line", { x1: 18, y1: 5, x2: 34, y2: 5, "stroke-width": 5, class: "link" })), "slow, fast link"));
}
