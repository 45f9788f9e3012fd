// Charts by plotly.js, which the hub serves itself; loaded with the first chart.

import { element } from "./dom.js";

const open = new Set();

let ready;

// Loads plotly once; resolves to false if the hub does not have it.
export function loadPlotly() {
  ready ??= new Promise((resolve) => {
    const script = document.createElement("script");
    script.src = "static/plotly.min.js";
    script.onload = () => resolve(true);
    script.onerror = () => resolve(false);
    document.head.append(script);
  });
  return ready;
}

// Redraws every open chart, e.g. after a change of theme.
export function redraw() {
  for (const chart of open) chart.draw(chart.traces, chart.marks);
}

// A colour of the style sheet in plotly's format.
export function colour(name) {
  const probe = document.getElementById("probe");
  probe.style.color = `var(${name})`;
  return getComputedStyle(probe).color;
}

export function seriesColour(owner) {
  if (owner === "held-out") return colour("--held-out");
  const slot = Number.parseInt(owner.replace(/\D+/g, ""), 10) || 0;
  return colour(`--series-${slot % 8}`);
}

export class Chart {
  // zero: the axis begins at 0; format: of its numbers; note: text beside the title.
  constructor({ id, title, note = "", zero = false, format = "~s", legend = true }) {
    this.zero = zero;
    this.format = format;
    this.legend = legend;
    this.traces = null;
    this.marks = [];
    this.busy = false;
    this.target = element("div", { class: "chart", id, role: "img", "aria-label": `${title}: no values yet` });
    this.title = title;
    this.note = element("span", { class: "quiet" }, note);
    this.caption = element("span", null, title);
    this.element = element("figure", null,
      element("figcaption", null, this.caption, " ", this.note), this.target);
    this.watcher = new ResizeObserver(() => {
      if (this.drawn && this.target.offsetParent) window.Plotly.Plots.resize(this.target);
      else if (this.traces) this.draw(this.traces, this.marks);
    });
    this.watcher.observe(this.target);
    open.add(this);
    loadPlotly().then((there) => {
      if (!there) this.#without();
      else if (this.traces) this.draw(this.traces, this.marks);
    });
  }

  // traces: [{owner, x, y, low, high, dash, held}]; marks: [{x, text, bad}]
  draw(traces, marks = [], axis = this.axis ?? "step", range = this.range) {
    this.axis = axis;
    this.range = range;
    this.traces = traces;
    this.marks = marks;
    // While hidden it has no width, and plotly's default is too wide for a column.
    if (!window.Plotly || !this.target.offsetParent) return;
    const shown = traces.flatMap((trace) => [...band(trace), line(trace)]);
    const empty = !traces.some(({ y }) => y.length);
    window.Plotly.react(this.target, empty ? [] : [...shown, ...this.#marks()], this.#layout(traces.length, empty), {
      displayModeBar: false, responsive: false, showLink: false, doubleClick: "reset",
    });
    this.drawn = true;
    const last = traces.filter(({ y }) => y.length)
      .map(({ owner, y }) => `${owner} ${y.at(-1)?.toPrecision(4) ?? "–"}`);
    this.target.setAttribute("aria-label",
      `${this.title}: ${last.length ? `last values ${last.join(", ")}` : "no values yet"}`);
  }

  rename(title) {
    this.title = title;
    this.caption.textContent = title;
  }

  close() {
    this.watcher.disconnect();
    open.delete(this);
    if (this.drawn) window.Plotly.purge(this.target);
  }

  #without() {
    this.target.replaceChildren(element("p", { class: "note" },
      "Charts need plotly, which this hub does not have: ", element("code", null, "pip install plotly"),
      " on its machine, then reload. Everything else works."));
  }

  // Events of members as small triangles along the lower edge.
  #marks() {
    if (!this.marks.length) return [];
    return [{
      x: this.marks.map(({ x }) => x), y: this.marks.map(() => 0.02), yaxis: "y2", type: "scatter",
      mode: "markers", name: "events", showlegend: false,
      text: this.marks.map(({ text }) => text),
      marker: {
        symbol: "triangle-up", size: 9,
        color: this.marks.map(({ bad }) => colour(bad ? "--bad" : "--quiet")),
      },
      hovertemplate: "%{text}<extra></extra>",
    }];
  }

  #layout(curves, empty) {
    const axis = {
      visible: !empty,
      gridcolor: colour("--line"), zeroline: false, linecolor: colour("--line"),
      tickfont: { color: colour("--quiet"), size: 11 }, automargin: true,
    };
    const time = this.axis === "time";
    return {
      margin: { l: 44, r: 10, t: 6, b: 26 },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: "system-ui, sans-serif", color: colour("--text"), size: 12 },
      xaxis: time ? { ...axis, type: "date", ...(this.range ? { range: this.range } : {}) } : { ...axis, type: "linear", rangemode: "tozero", tickformat: "~s" },
      yaxis: { ...axis, rangemode: this.zero ? "tozero" : "normal", tickformat: this.format, nticks: 6 },
      yaxis2: { overlaying: "y", range: [0, 1], visible: false, fixedrange: true },
      annotations: empty ? [{
        text: "no values yet", showarrow: false, x: 0.5, y: 0.5, xref: "paper", yref: "paper",
        font: { color: colour("--quiet") },
      }] : [],
      showlegend: this.legend && curves > 1, uirevision: `kept-${this.axis}`, hovermode: "closest",
      hoverlabel: { font: { family: "system-ui, sans-serif", size: 12 } },
      legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, font: { size: 11 } },
    };
  }
}

// New arrays at each draw: plotly treats the same array as unchanged data.
function line({ owner, x, y, held = false, dash = "solid", color = null }) {
  const shade = color ?? seriesColour(owner);
  return {
    x: [...x], y: [...y], name: owner, type: "scatter",
    mode: held || y.length < 2 ? "lines+markers" : "lines",
    line: { color: shade, width: held ? 2.4 : 1.4, dash: held ? "dot" : dash },
    marker: { color: shade, size: 6 }, connectgaps: false,
    hovertemplate: "%{y:.4~g} at %{x}<extra>%{fullData.name}</extra>",
  };
}

// The area between minimum and maximum of each bucket.
function band({ owner, x, low, high, color = null }) {
  if (!low) return [];
  const shade = color ?? seriesColour(owner);
  const edge = { x: [...x], type: "scatter", mode: "lines", line: { width: 0 }, hoverinfo: "skip", showlegend: false };
  const soft = shade.replace("rgb(", "rgba(").replace(")", ", 0.16)");
  return [{ ...edge, y: [...low] }, { ...edge, y: [...high], fill: "tonexty", fillcolor: soft }];
}

export function dates(seconds) {
  return seconds.map((second) => new Date(second * 1000).toISOString());
}
