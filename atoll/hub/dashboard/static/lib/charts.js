// Line charts in SVG: members faint, their mean bold, linked zoom and one tooltip for all series.

import { drawn, element, fill, set } from "./dom.js";
import { clock, count, short } from "./format.js";
import { gaps, logTicks, meanOf, nearest, smooth, ticks, timeText, timeTicks } from "./plot.js";

const LEFT = 54, RIGHT = 10, TOP = 8, BOTTOM = 36;
const DRAGGED = 6; // pixels; less is a click
const LISTED = 12; // series in a tooltip
const MARKED_PX = 8;
const HALF_DIGIT = 3.4; // pixels: so far from the edge a number is not cut off
const FAINT_FROM = 2; // members, from which their mean is drawn

export const AXIS_TITLES = {
  step: "optimizer step", env_step: "environment step", update: "update of the critic", tokens: "tokens per member", time: "time of day", seconds: "seconds since start",
};

// A colour of the style sheet as canvases need it.
export function colour(name) {
  const probe = document.getElementById("probe");
  probe.style.color = `var(${name})`;
  return getComputedStyle(probe).color;
}

export const shade = (at) => `var(--series-${at % 8})`;

export function seriesColour(owner) {
  return owner === "held-out" ? "var(--held-out)" : shade(Number.parseInt(owner.replace(/\D+/g, ""), 10) || 0);
}

export const dates = (seconds) => seconds.map((second) => second * 1000);

// Charts that zoom together, are smoothed together, and show the same place.
export class ChartGroup {
  constructor() {
    this.charts = new Set();
    this.range = null;
    this.weight = 0;
    this.log = false;
    this.reset = element("button", { type: "button", hidden: "", click: () => this.zoom(null) }, "Reset zoom");
    this.tools = [this.reset,
      element("label", { class: "filter" }, "smooth ", element("select", {
        class: "smooth", change: (event) => { this.weight = Number(event.target.value); this.#redraw(); },
      }, ...[[0, "none"], [0.8, "some"], [0.95, "much"]].map(([value, text]) => element("option", { value }, text)))),
      element("label", { class: "filter" }, element("input", {
        type: "checkbox", class: "log", change: (event) => { this.log = event.target.checked; this.#redraw(); },
      }), " log scale")];
  }

  zoom(range) {
    this.range = range;
    this.reset.hidden = !range;
    this.#redraw();
  }

  point(x) { for (const chart of this.charts) chart.cross(x); }

  #redraw() { for (const chart of this.charts) chart.redraw(); }
}

export class Chart {
  // unit: beside the title and along the axis; zero: the axis begins at 0; format: of its values;
  // mean: a bold one of the members; group: what it is linked with.
  constructor({ id, title, unit = "", zero = false, format = short, legend = true, mean = false, group = new ChartGroup() }) {
    Object.assign(this, { title, zero, format, legend, mean, group, axis: "step", traces: null, marks: [], size: [0, 0] });
    this.svg = drawn("svg", { class: "plot", "aria-hidden": "true" });
    this.tip = element("div", { class: "tip", hidden: "" });
    this.target = element("div", { class: "chart", id, role: "img", "aria-label": `${title}: no values yet` }, this.svg, this.tip);
    this.note = element("span", { class: "quiet" }, unit);
    this.unit = unit;
    this.caption = element("span", null, title);
    this.keys = element("ul", { class: "legend" });
    this.element = element("figure", null, element("figcaption", null, this.caption, " ", this.note), this.target, this.keys);
    this.watcher = new ResizeObserver(() => {
      this.size = [this.target.clientWidth, this.target.clientHeight];
      this.redraw();
    });
    this.watcher.observe(this.target);
    this.#listen();
    group.charts.add(this);
  }

  // traces: [{owner, label, x, y, time, low, high, held, color}], x ascending (milliseconds for the axis
  // "time"); marks: [{x, text, bad}]; range: what the axis shows without a zoom
  draw(traces, marks = [], axis = this.axis, range = null) {
    if (axis !== this.axis) this.group.range = null;
    Object.assign(this, { traces: traces.filter(({ y }) => y.length), marks, axis, range });
    const last = this.traces.map(({ owner, label, y }) => `${label ?? owner} ${this.format(y.findLast((value) => value != null))}`);
    this.target.setAttribute("aria-label", `${this.title}: ${last.length ? `last values ${last.join(", ")}` : "no values yet"}`);
    this.redraw();
  }

  redraw() {
    const [width, height] = this.size; // asked for here, it would lay out the page once per chart
    if (!this.traces || !width || !height) return;
    set(this.svg, { viewBox: `0 0 ${width} ${height}`, width, height });
    this.shown = this.#lines();
    this.target.data = this.shown.map(({ owner, x, y, bold }) => ({ name: owner, x, y, bold: Boolean(bold) }));
    this.target.marks = this.marks;
    this.#scale(width, height);
    this.svg.replaceChildren(...(this.shown.length ? this.#parts(width, height) : [text("no values yet", width / 2, height / 2)]));
    fill(this.keys, ...(this.legend && this.shown.length > 1 ? this.shown.slice(0, LISTED).map((line) => {
      const sign = swatch(line);
      return element("li", null, sign, line.label ?? line.owner);
    }) : []));
  }

  rename(title, unit = this.unit) {
    this.title = title;
    this.unit = unit;
    this.caption.textContent = title;
    this.note.textContent = unit;
  }

  close() {
    this.watcher.disconnect();
    this.group.charts.delete(this);
  }

  #lines() {
    const members = this.traces.filter(({ held }) => !held);
    const faint = this.mean && members.length >= FAINT_FROM;
    const lines = this.traces.map((trace) => ({
      ...trace, y: smooth(trace.y, trace.held ? 0 : this.group.weight), color: trace.color ?? seriesColour(trace.owner),
      faint: faint && !trace.held, gaps: gaps(trace.time),
    }));
    if (faint) lines.push({ owner: "mean", ...meanOf(lines.filter(({ held }) => !held)), color: "var(--text)", bold: true, gaps: new Set() });
    return lines;
  }

  #scale(width, height) {
    const xs = this.shown.flatMap(({ x }) => [x[0], x.at(-1)]);
    const [left, right] = this.group.range ?? this.range ?? [this.axis === "time" ? Math.min(...xs) : Math.min(0, ...xs), Math.max(...xs)];
    this.span = [left, right > left ? right : left + 1];
    let low = Infinity, high = -Infinity;
    for (const { x, y, low: least, high: most } of this.shown) {
      y.forEach((value, at) => {
        if (!Number.isFinite(value) || x[at] < left || x[at] > right) return;
        low = Math.min(low, least?.[at] ?? value);
        high = Math.max(high, most?.[at] ?? value);
      });
    }
    if (!Number.isFinite(low)) [low, high] = [0, 1];
    this.isLog = this.group.log && low > 0;
    if (this.zero && !this.isLog) low = Math.min(0, low);
    if (high - low <= 1e-6 * Math.abs(high)) { // one value: the line is in the middle
      const around = 0.5 * (Math.abs(high) || 1);
      [low, high] = this.isLog ? [low / 2, high * 2] : [low - (this.zero ? 0 : around), high + around];
    }
    const room = this.isLog ? 0 : 0.05 * (high - low);
    this.reach = [this.zero && low >= 0 ? low : low - room, high + room];
    const scale = this.isLog ? Math.log : (value) => value;
    const [bottom, top] = this.reach.map(scale);
    this.placeX = (x) => LEFT + ((x - this.span[0]) / (this.span[1] - this.span[0])) * (width - LEFT - RIGHT);
    this.valueX = (px) => this.span[0] + ((px - LEFT) / (width - LEFT - RIGHT)) * (this.span[1] - this.span[0]);
    this.placeY = (y) => height - BOTTOM - ((scale(y) - bottom) / (top - bottom)) * (height - BOTTOM - TOP);
  }

  #parts(width, height) {
    const floor = height - BOTTOM;
    const clip = `${this.target.id}-clip`;
    const rows = (this.isLog ? logTicks : ticks)(...this.reach, Math.max(2, Math.floor(height / 42)));
    const most = Math.max(2, Math.floor((width - LEFT) / 80));
    const columns = this.axis === "time" ? timeTicks(...this.span, most) : { found: ticks(...this.span, most) };
    this.line = drawn("line", { class: "cross", y1: TOP, y2: floor, visibility: "hidden" });
    this.box = drawn("rect", { class: "zoom", y: TOP, height: floor - TOP, visibility: "hidden" });
    return [
      drawn("clipPath", { id: clip }, drawn("rect", { x: LEFT, y: 0, width: Math.max(0, width - LEFT), height: floor })),
      ...rows.flatMap((value) => [
        drawn("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: this.placeY(value), y2: this.placeY(value) }),
        text(this.format(value).replace(/\.0(?!\d)/, ""), LEFT - 6, this.placeY(value) + 4, "end"),
      ]),
      ...columns.found.map((value) => {
        const label = this.axis === "time" ? timeText(value, columns.step) : count(value);
        return text(label, Math.min(this.placeX(value), width - HALF_DIGIT * label.length), floor + 15);
      }),
      text(AXIS_TITLES[this.axis] ?? this.axis, (LEFT + width - RIGHT) / 2, height - 5, "middle", "title"),
      drawn("g", { "clip-path": `url(#${clip})` }, ...this.shown.flatMap((line) => this.#line(line)), ...this.marks.map((mark) => this.#mark(mark, floor))),
      this.line, this.box,
    ];
  }

  #line(line) {
    const { x, y, color, held, faint, bold } = line;
    const parts = [];
    if (line.low) parts.push(drawn("path", { class: "band", d: this.#area(line), fill: color }));
    const path = drawn("path", { class: `curve${faint ? " faint" : ""}${bold ? " bold" : ""}${held ? " held" : ""}`, d: this.#path(line) });
    path.style.stroke = color;
    parts.push(path);
    if (held || y.length < 2) {
      parts.push(...x.map((at, place) => drawn("circle", { cx: this.placeX(at), cy: this.placeY(y[place]), r: 2.6, fill: color })));
    }
    return parts;
  }

  #path({ x, y, gaps: broken }) {
    let pen = "M";
    return x.map((at, place) => {
      if (!Number.isFinite(y[place])) { pen = "M"; return ""; }
      const step = `${broken.has(place) ? "M" : pen}${this.placeX(at).toFixed(1)},${this.placeY(y[place]).toFixed(1)}`;
      pen = "L";
      return step;
    }).join("");
  }

  #area({ x, low, high }) {
    const known = x.map((at, place) => [at, low[place], high[place]]).filter(([, least]) => least != null);
    const edge = (points) => points.map(([at, value]) => `${this.placeX(at).toFixed(1)},${this.placeY(value).toFixed(1)}`).join("L");
    return known.length ? `M${edge(known.map(([at, least]) => [at, least]))}L${edge(known.map(([at, , most]) => [at, most]).reverse())}Z` : "";
  }

  #mark({ x, text: label, bad }, floor) {
    const at = this.placeX(x);
    return drawn("path", { class: bad ? "mark bad" : "mark", d: `M${at - 5},${floor}h10l-5,-8z` }, drawn("title", null, label));
  }

  // ------------------------------------------------------------------- pointing and zooming

  #listen() {
    const at = (event) => event.clientX - this.target.getBoundingClientRect().left;
    let from = null;
    this.target.addEventListener("pointerdown", (event) => { if (event.pointerType === "mouse" && event.button === 0) from = at(event); });
    this.target.addEventListener("pointermove", (event) => {
      if (!this.shown?.length) return;
      const px = at(event);
      this.group.point(this.valueX(px));
      this.#tell(px);
      if (from != null) set(this.box, { visibility: "visible", x: Math.min(from, px), width: Math.abs(px - from) });
    });
    this.target.addEventListener("pointerup", (event) => {
      const px = at(event);
      if (from != null && Math.abs(px - from) > DRAGGED) this.group.zoom([this.valueX(Math.min(from, px)), this.valueX(Math.max(from, px))]);
      from = null;
    });
    this.target.addEventListener("pointerleave", () => {
      from = null;
      this.tip.hidden = true;
      this.group.point(null);
    });
    this.target.addEventListener("dblclick", () => this.group.zoom(null));
  }

  // The line that shows the same place in all linked charts.
  cross(x) {
    if (!this.line || !this.shown?.length) return;
    const inside = x != null && x >= this.span[0] && x <= this.span[1];
    set(this.line, { visibility: inside ? "visible" : "hidden", ...(inside ? { x1: this.placeX(x), x2: this.placeX(x) } : {}) });
    if (x == null) set(this.box, { visibility: "hidden" });
  }

  #tell(px) {
    const x = this.valueX(px);
    const values = this.shown.map((line) => {
      const place = nearest(line.x, x);
      return { line, x: line.x[place], y: line.y[place] };
    }).filter(({ y }) => Number.isFinite(y)).sort((a, b) => b.y - a.y);
    if (!values.length) return;
    const [middle] = [...values].sort((a, b) => Math.abs(a.x - x) - Math.abs(b.x - x));
    const marks = this.marks.filter((mark) => Math.abs(this.placeX(mark.x) - px) < MARKED_PX).slice(0, 3);
    fill(this.tip,
      element("b", null, this.axis === "time" ? clock(middle.x / 1000) : `${AXIS_TITLES[this.axis] ?? this.axis} ${count(middle.x)}`),
      ...values.slice(0, LISTED).map(({ line, y }) => {
        return element("div", null, swatch(line), element("span", null, line.label ?? line.owner), element("span", { class: "value" }, this.format(y)));
      }),
      values.length > LISTED ? element("div", { class: "quiet" }, `and ${values.length - LISTED} more`) : null,
      ...marks.map((mark) => element("div", { class: mark.bad ? "bad" : "quiet" }, mark.text)));
    this.tip.hidden = false;
    const room = this.target.clientWidth;
    this.tip.style.left = `${Math.max(0, px > room / 2 ? px - this.tip.offsetWidth - 14 : Math.min(px + 14, room - this.tip.offsetWidth))}px`;
  }
}

// The colour of a line; held-out values are dotted.
function swatch({ color, held }) {
  const sign = element("span", { class: held ? "swatch held" : "swatch" });
  if (!held) sign.style.background = color;
  return sign;
}

function text(content, x, y, anchor = "middle", name = null) {
  return drawn("text", { x, y, "text-anchor": anchor, class: name }, content);
}
