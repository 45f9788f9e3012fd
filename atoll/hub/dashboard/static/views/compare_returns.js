// Compare, for RL jobs: one chart per policy with its returns in all selected jobs, in the colours
// of the jobs.

import { Chart, shade } from "../lib/charts.js";
import { element } from "../lib/dom.js";

const MOST = 12;

export class ReturnPanels {
  constructor() {
    this.charts = new Map();
    this.element = element("div", { class: "charts panels", hidden: "" });
  }

  // jobs: [{job, roles, started, learning, at}], `at` is the index of the job in the selection.
  draw(jobs, axis) {
    const traces = new Map();
    for (const job of jobs) {
      for (const { policy, curves } of job.learning.byPolicy(job.roles, "return")) {
        traces.set(policy, [...(traces.get(policy) ?? []), ...curves.map((curve) => trace(job, curve, curves.length, axis))]);
      }
    }
    const names = [...traces.keys()].slice(0, MOST);
    this.#make(names);
    this.element.hidden = !names.length;
    for (const name of names) this.charts.get(name).draw(traces.get(name), [], axis === "time" ? "seconds" : "env_step");
  }

  #make(names) {
    if (names.join("\n") === [...this.charts.keys()].join("\n")) return;
    this.close();
    this.charts = new Map(names.map((name, at) => [
      name, new Chart({ id: `compare-return-${at}`, title: `Return of ${name}`, unit: "by job", legend: false }),
    ]));
    this.element.style.setProperty("--panels", Math.min(3, names.length) || 1);
    this.element.replaceChildren(...[...this.charts.values()].map((chart) => chart.element));
  }

  close() { for (const chart of this.charts.values()) chart.close(); }
}

// Against environment steps, or the time since the job began.
function trace({ job, started, at }, curve, among, axis) {
  const begin = started ?? curve.time[0] ?? 0;
  return {
    owner: among > 1 ? `${job} ${curve.owner}` : job, color: shade(at),
    x: axis === "time" ? curve.time.map((moment) => moment - begin) : curve.step, y: curve.y,
  };
}
