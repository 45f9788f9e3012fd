// The two charts, drawn by plotly.js, which the hub serves from its own disk.

const MAX_POINTS = 4000;
const DRAWN_POINTS = 1200;

let ready;

// Loads plotly once; resolves to false where the hub does not have it.
export function loadPlotly() {
  ready ??= new Promise((resolve) => {
    const script = document.createElement("script");
    script.src = "/static/plotly.min.js";
    script.onload = () => resolve(true);
    script.onerror = () => resolve(false);
    document.head.append(script);
  });
  return ready;
}

// Points of one job by curve. Long curves lose every second point of their older half.
export class Curves {
  constructor() { this.byName = new Map(); this.shares = new Map(); }

  add(points) {
    for (const { member, step, values } of points) {
      if (values.held_out_tokens) this.#share(step, values);
      for (const [name, value] of Object.entries(values)) {
        if (value == null) continue;
        if (name === "held_out_loss") this.#push("held-out", "held_out", step, value);
        else if (name === "loss" || name === "tokens_per_s") this.#push(member, name, step, value);
      }
    }
  }

  // Members evaluate shares of the held-out text at the same step: the loss is that of all together.
  #share(step, values) {
    const [sum, tokens] = this.shares.get(step) ?? [0, 0];
    const both = [sum + values.held_out_loss_sum, tokens + values.held_out_tokens];
    this.shares.set(step, both);
    this.#push("held-out", "held_out", step, both[0] / both[1]);
  }

  #push(owner, kind, step, value) {
    const key = `${kind}/${owner}`;
    const curve = this.byName.get(key) ?? { owner, kind, x: [], y: [] };
    this.byName.set(key, curve);
    const again = kind === "held_out" && curve.x.at(-1) === step;
    if (again) { curve.y[curve.y.length - 1] = value; return; }
    curve.x.push(step);
    curve.y.push(value);
    if (curve.x.length > MAX_POINTS) {
      const keep = (_, at) => at > MAX_POINTS / 2 || at % 2 === 0;
      curve.x = curve.x.filter(keep);
      curve.y = curve.y.filter(keep);
    }
  }

  of(...kinds) {
    return [...this.byName.values()]
      .filter((curve) => kinds.includes(curve.kind))
      .sort((a, b) => a.owner.localeCompare(b.owner, "en", { numeric: true }));
  }
}

// Always a new array: plotly takes the same array for unchanged data.
function thinned(values) {
  const stride = Math.ceil(values.length / DRAWN_POINTS);
  return stride < 2 ? [...values] : values.filter((_, at) => at % stride === 0 || at === values.length - 1);
}

function style(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

export class Chart {
  constructor(target, kinds, { zero = false } = {}) {
    this.target = target;
    this.kinds = kinds;
    this.zero = zero;
    this.drawn = false;
    new ResizeObserver(() => {
      if (!target.offsetParent) return;
      if (this.drawn) window.Plotly.Plots.resize(target);
      else this.draw(this.curves);
    }).observe(target);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw(this.curves));
  }

  draw(curves) {
    this.curves = curves;
    // Hidden, it has no width: plotly would take one of its own, too wide for a column.
    if (!curves || !window.Plotly || !this.target.offsetParent) return;
    const traces = curves.of(...this.kinds).map((curve) => this.#trace(curve));
    window.Plotly.react(this.target, traces, this.#layout(traces.length), {
      displayModeBar: false, responsive: false, showLink: false,
    });
    this.drawn = true;
    const last = curves.of(...this.kinds).map((c) => `${c.owner} ${c.y.at(-1).toPrecision(4)}`);
    this.target.setAttribute("role", "img");
    this.target.setAttribute("aria-label", last.length ? `Last values: ${last.join(", ")}` : "No values yet");
  }

  #trace(curve) {
    const heldOut = curve.kind === "held_out";
    const slot = Number.parseInt(curve.owner.slice(1), 10) || 0;
    const color = style(heldOut ? "--held-out" : `--series-${slot % 8}`);
    return {
      x: thinned(curve.x), y: thinned(curve.y), name: curve.owner, type: "scatter",
      mode: heldOut ? "lines+markers" : "lines",
      line: { color, width: heldOut ? 2.5 : 1.3, dash: heldOut ? "dot" : "solid" },
      marker: { color, size: 7 }, opacity: heldOut ? 1 : 0.85,
      hovertemplate: "%{y:.4~g} at step %{x}<extra>%{fullData.name}</extra>",
    };
  }

  #layout(curves) {
    const axis = {
      gridcolor: style("--line"), zeroline: false, linecolor: style("--line"),
      tickfont: { color: style("--quiet"), size: 11 }, automargin: true,
    };
    return {
      margin: { l: 40, r: 8, t: 8, b: 28 },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: "system-ui, sans-serif", color: style("--text") },
      xaxis: { ...axis, rangemode: "tozero", tickformat: "~s" },
      yaxis: { ...axis, rangemode: this.zero ? "tozero" : "normal", tickformat: this.zero ? "~s" : "" },
      showlegend: curves > 0, uirevision: "kept", hovermode: "closest",
      legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, font: { size: 11 } },
    };
  }
}
