// A chart of any reported metric, chosen from a list.

import { Chart, dates } from "./charts.js";
import { element } from "./dom.js";

export class MetricChart {
  constructor(data) {
    this.data = data;
    this.kind = "";
    this.names = "";
    this.chart = new Chart({ id: "metric-chart", title: "A metric of your choice", format: "~g" });
    this.select = element("select", {
      id: "metric", "aria-label": "Metric to draw",
      change: (event) => { this.kind = event.target.value; this.draw(this.axis); },
    });
    this.element = element("div", { class: "metric" },
      element("label", { class: "filter" }, "metric ", this.select), this.chart.element);
    this.element.hidden = true;
  }

  draw(axis) {
    this.axis = axis;
    this.#list();
    if (!this.kind) return;
    this.chart.rename(this.kind);
    this.chart.draw(this.data.curves.of(this.kind).map((curve) => ({
      owner: curve.owner, y: curve.y, x: axis === "time" ? dates(curve.time) : curve[axis],
    })), [], axis);
  }

  #list() {
    const kinds = [...this.data.curves.kinds()].sort();
    this.element.hidden = !kinds.length;
    if (kinds.join("\n") === this.names) return;
    this.names = kinds.join("\n");
    if (!kinds.includes(this.kind)) this.kind = kinds.includes("grad_norm") ? "grad_norm" : kinds[0] ?? "";
    this.select.replaceChildren(...kinds.map((name) => (
      element("option", { value: name, selected: name === this.kind && "" }, name))));
  }

  close() { this.chart.close(); }
}
