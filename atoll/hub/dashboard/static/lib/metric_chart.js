// A chart of any reported metric that no other chart of the page shows, chosen from a list.

import { Chart, dates } from "./charts.js";
import { element } from "./dom.js";

export class MetricChart {
  constructor(data, group, drawn = []) {
    this.data = data;
    this.drawn = new Set(drawn);
    this.kind = "";
    this.names = "";
    this.chart = new Chart({ id: "metric-chart", title: "Another measurement", mean: true, group });
    this.select = element("select", {
      id: "metric", "aria-label": "Metric to draw",
      change: (event) => { this.kind = event.target.value; this.draw(this.axis); },
    });
    this.element = element("div", { class: "metric" },
      element("label", { class: "filter" }, "also draw ", this.select), this.chart.element);
    this.element.hidden = true;
  }

  draw(axis) {
    this.axis = axis;
    this.#list();
    if (!this.kind) return;
    this.chart.rename(words(this.kind));
    this.chart.draw(this.data.curves.of(this.kind).map((curve) => ({
      owner: curve.owner, label: this.data.labelOf(curve.owner), y: curve.y, time: curve.time, x: axis === "time" ? dates(curve.time) : curve[axis],
    })), [], axis);
  }

  #list() {
    const kinds = [...this.data.curves.kinds()].filter((kind) => !this.drawn.has(kind)).sort();
    this.element.hidden = !kinds.length;
    if (kinds.join("\n") === this.names) return;
    this.names = kinds.join("\n");
    if (!kinds.includes(this.kind)) this.kind = kinds.includes("grad_norm") ? "grad_norm" : kinds[0] ?? "";
    this.select.replaceChildren(...kinds.map((name) => (
      element("option", { value: name, selected: name === this.kind && "" }, words(name)))));
  }

  close() { this.chart.close(); }
}

const words = (name) => name.replaceAll("_", " ");
