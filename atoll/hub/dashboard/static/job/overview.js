// Overview of a job: stages of a SWARM or paths of a modular model, value of each node, curves, and events.

import { Chart, ChartGroup, dates } from "../lib/charts.js";
import { card, element, empty, fill, link, pill } from "../lib/dom.js";
import { count, percent, rate, short } from "../lib/format.js";
import { eventLine, isBad, spoken } from "../lib/event_line.js";
import { MetricChart } from "../lib/metric_chart.js";
import { Table } from "../lib/table.js";
import { ExamplesCard } from "./examples.js";
import { PathsCard } from "./paths.js";
import { StagesCard } from "./stages.js";

const CHARTS = [
  ["loss-chart", "Loss", "", ["loss", "held_out"], { format: short }], // its unit is the job's
  ["speed-chart", "Speed", "tokens per second of each member", ["tokens_per_s"], { zero: true, format: count }],
  ["busy-chart", "Computing", "share of the time", ["utilisation"], { zero: true, format: (value) => percent(value) }],
  ["bytes-chart", "Traffic", "of each member, both ways", ["bytes"], { zero: true, format: rate }],
];
const AXES = [["step", "step"], ["tokens", "tokens"], ["time", "time"]];
const REDRAW_MS = 900;
const SHOWN_EVENTS = 200;
const MARKED = /^(member-|stage-moved|reducer|node|checkpoint|set-back|resumed|stopped|paused|job-)/;

export class OverviewPart {
  constructor(store, data) {
    this.store = store;
    this.data = data;
    this.axis = "step";
    this.drawnAt = -Infinity;
    this.group = new ChartGroup();
    this.charts = CHARTS.map(([id, title, note, kinds, options]) => [new Chart({ id, title, unit: note, mean: true, group: this.group, ...options }), kinds]);
    this.worthText = element("p", { class: "worth" });
    this.worthTable = new Table({ label: "What each node adds", columns: WORTH, key: (row) => row.member, cards: true });
    this.worth = card("Value of each node", this.worthText, this.worthTable.element);
    this.worth.hidden = true;
    this.stages = new StagesCard();
    this.paths = new PathsCard();
    this.examples = new ExamplesCard(data);
    this.metric = new MetricChart(data, this.group, CHARTS.flatMap(([, , , kinds]) => kinds));
    this.events = element("ol", { class: "events", tabindex: "0", "aria-label": "Events of the job" });
    this.element = element("div", { class: "stackview" },
      this.stages.element,
      this.paths.element,
      this.worth,
      this.curvesCard = element("section", { class: "card", "aria-labelledby": "curves-title" },
        element("div", { class: "head" }, element("h2", { id: "curves-title" }, "Curves"),
          element("span", { class: "quiet" }, "triangles are events; drag to zoom all"),
          element("span", { class: "space" }), ...this.group.tools,
          element("label", { class: "filter" }, "against ", element("select", {
            id: "axis", change: (event) => { this.axis = event.target.value; this.drawnAt = -Infinity; this.data.changed.points = true; this.update(); },
          }, ...AXES.map(([value, text]) => element("option", { value }, text))))),
        element("div", { class: "charts" }, ...this.charts.map(([chart]) => chart.element)),
        this.metric.element),
      this.examples.element,
      card("Events", this.events));
  }

  update() {
    this.curvesCard.hidden = !this.data.last.points; // nothing was measured yet
    this.stages.show(this.data.view?.swarm);
    this.paths.show(this.data.view?.paths);
    this.examples.update();
    if (this.data.take("worth")) this.#showWorth(this.data.worth);
    const now = performance.now();
    const events = this.data.take("events");
    if (events) this.#showEvents();
    this.late ||= events;
    if ((this.data.changed.points || this.late) && now - this.drawnAt > REDRAW_MS) {
      this.data.take("points");
      this.late = false;
      this.drawnAt = now;
      this.#draw();
    }
  }

  #draw() {
    const { curves, events } = this.data;
    const place = { time: (t) => dates([t])[0], step: (t) => curves.stepAt(t) }[this.axis];
    const marks = place ? events.filter(({ kind }) => MARKED.test(kind)).slice(-60)
      .map(({ time, text, kind }) => ({ x: place(time), text: spoken(text, this.data.view), bad: isBad(kind) })) : [];
    this.charts[0][0].rename("Loss", this.data.view?.loss_unit ?? "");
    for (const [chart, kinds] of this.charts) {
      chart.element.hidden = !curves.of(...kinds).length; // a script need not measure it
      chart.draw(curves.of(...kinds).map((curve) => ({
        owner: curve.owner, label: this.data.labelOf(curve.owner), held: curve.kind === "held_out", y: curve.y, time: curve.time,
        x: this.axis === "time" ? dates(curve.time) : curve[this.axis],
      })), marks, this.axis);
    }
    this.metric.draw(this.axis);
  }

  #showWorth(worth) {
    this.worth.hidden = !worth?.nodes?.length;
    if (this.worth.hidden) return;
    fill(this.worthText, element("b", null, worth.text), worth.next?.text && !worth.text.includes(worth.next.text) ? ` ${worth.next.text}` : null);
    this.worthTable.show(worth.nodes ?? []);
    this.worthTable.element.hidden = worth.tokens_per_s == null; // until there are figures
  }

  #showEvents() {
    const newest = this.data.events.slice(-SHOWN_EVENTS).reverse();
    if (!newest.length) { fill(this.events, element("li", null, empty("Nothing yet."))); return; }
    fill(this.events, ...newest.map((event) => eventLine(event, { view: this.data.view })));
  }

  close() {
    for (const [chart] of this.charts) chart.close();
    this.metric.close();
    this.examples.close();
  }
}

const WORTH = [
  { name: "Machine", align: "first", value: ({ node }) => link(`#/fleet/${encodeURIComponent(node)}`, node) },
  { name: "Speed", align: "right", value: ({ tokens_per_s: speed }) => count(speed) },
  { name: "Adds", align: "right", value: ({ adds_tokens_per_s: speed }) => signed(speed) },
  { name: "Share", align: "right", value: ({ adds_percent: share }) => percent(share, 1) },
  { name: "Advice", value: ({ advice }) => pill(advice) },
  { name: "Why", align: "text", value: why },
];

// Without the advice, which stands beside it: "keep lap3: it adds ..." is "it adds ...".
function why({ node, advice, text = "" }) {
  const begin = `${advice} ${node}: `;
  return text.startsWith(begin) ? text.slice(begin.length) : text;
}

function signed(value) {
  if (value == null) return "–";
  return `${value < 0 ? "−" : "+"}${count(Math.abs(value))}`;
}
