// Rounds of every member as bars on a canvas: compute, wait, send, vote, apply.

import { colour } from "../lib/charts.js";
import { element, setText } from "../lib/dom.js";
import { clock, duration } from "../lib/format.js";

const PHASES = [
  ["compute_s", "compute", "--series-0"], ["wait_s", "wait", "--wait"], ["send_s", "send", "--series-6"],
  ["vote_s", "vote", "--series-5"], ["apply_s", "apply", "--series-1"],
];
const ROW = 26, TOP = 20, BAR = 15;

export class Gantt {
  constructor() {
    this.rounds = [];
    this.members = [];
    this.chosen = -1;
    this.onZoom = () => {};
    this.canvas = element("canvas", { role: "img", tabindex: "0", id: "gantt", "aria-label": "No rounds yet" });
    this.note = element("p", { class: "note-line", role: "status" });
    this.element = element("div", { class: "gantt" },
      element("ul", { class: "legend", "aria-label": "Colours" }, ...PHASES.map(([, text, color]) => {
        const sign = element("span", { class: "swatch" });
        sign.style.background = `var(${color})`;
        return element("li", null, sign, text);
      })),
      this.canvas, this.note);
    this.canvas.addEventListener("keydown", (event) => this.#key(event));
    this.canvas.addEventListener("mousemove", (event) => this.#point(event));
    this.canvas.addEventListener("mouseleave", () => this.#choose(-1));
    this.watcher = new ResizeObserver(() => this.#draw());
    this.watcher.observe(this.element);
    this.theme = () => this.#draw();
    document.addEventListener("themechange", this.theme);
  }

  close() {
    this.watcher.disconnect();
    document.removeEventListener("themechange", this.theme);
  }

  // label: of a member, for people
  show(rounds, label) {
    this.rounds = rounds;
    this.label = label;
    this.bars = rounds.map(barsOf);
    const names = new Set(this.bars.flatMap((bars) => bars.map(({ member }) => member)));
    this.members = [...names].sort((a, b) => a.localeCompare(b, "en", { numeric: true }))
      .map((member) => [member, label(member)]);
    if (this.chosen >= rounds.length) this.chosen = -1;
    this.canvas.setAttribute("aria-label", rounds.length
      ? `${rounds.length} rounds of ${this.members.length} members; the table below has the same figures`
      : "No rounds yet");
    this.#draw();
  }

  #draw() {
    const width = this.element.clientWidth;
    if (!width) return;
    const height = TOP + ROW * Math.max(1, this.members.length) + 4;
    const scale = window.devicePixelRatio || 1;
    this.canvas.width = width * scale;
    this.canvas.height = height * scale;
    this.canvas.style.height = `${height}px`;
    const pen = this.canvas.getContext("2d");
    pen.scale(scale, scale);
    pen.font = "12px system-ui, sans-serif";
    const all = (this.bars ?? []).flat();
    if (!all.length) {
      pen.fillStyle = colour("--quiet");
      pen.fillText("No rounds yet.", 2, TOP + 14);
      return;
    }
    const label = Math.min(150, width * 0.26);
    const from = Math.min(...all.map(({ start }) => start));
    const to = Math.max(...all.map(({ end }) => end));
    this.x = (time) => label + ((time - from) / (to - from || 1)) * (width - label - 4);
    this.#axis(pen, from, to, height, width, label);
    const colours = PHASES.map(([, , name]) => colour(name));
    this.bars.forEach((bars, at) => bars.forEach((bar) => this.#bar(pen, bar, colours, at, label)));
    pen.fillStyle = colour("--text");
    this.members.forEach(([, name], row) => pen.fillText(name, 0, TOP + row * ROW + 13, label - 8));
    this.#tell();
  }

  #axis(pen, from, to, height, width, label) {
    pen.strokeStyle = colour("--line");
    pen.fillStyle = colour("--quiet");
    const count = Math.max(2, Math.floor((width - label) / 110));
    for (let at = 0; at <= count; at += 1) {
      const time = from + ((to - from) * at) / count;
      const x = Math.round(this.x(time)) + 0.5;
      pen.beginPath();
      pen.moveTo(x, TOP - 4);
      pen.lineTo(x, height);
      pen.stroke();
      const part = to - from < 2 * count ? `.${String(Math.floor((time % 1) * 100)).padStart(2, "0")}` : "";
      if (at < count) pen.fillText(clock(time) + part, x + 3, 11);
    }
  }

  #bar(pen, bar, colours, round, label) {
    const row = this.members.findIndex(([member]) => member === bar.member);
    const y = TOP + row * ROW;
    let time = bar.start;
    pen.globalAlpha = this.chosen >= 0 && this.chosen !== round ? 0.35 : 1;
    bar.seconds.forEach((seconds, phase) => {
      const x = Math.max(label, this.x(time)), end = this.x(time + seconds);
      time += seconds;
      if (seconds <= 0 || end <= label) return;
      pen.fillStyle = colours[phase];
      pen.fillRect(x, y, Math.max(0.7, end - x), BAR);
    });
    if (!bar.committed) {
      pen.strokeStyle = colour("--bad");
      pen.lineWidth = 1.5;
      pen.strokeRect(this.x(bar.start), y + 0.5, Math.max(1, this.x(bar.end) - this.x(bar.start)), BAR - 1);
      pen.lineWidth = 1;
    }
    pen.globalAlpha = 1;
  }

  #key(event) {
    const steps = { ArrowLeft: -1, ArrowRight: 1 };
    if (steps[event.key] && this.rounds.length) {
      const from = this.chosen < 0 ? this.rounds.length - (steps[event.key] < 0 ? 0 : 1) : this.chosen;
      this.#choose(Math.max(0, Math.min(this.rounds.length - 1, from + steps[event.key])));
    } else if (event.key === "+" || event.key === "=") this.onZoom(1);
    else if (event.key === "-") this.onZoom(-1);
    else if (event.key === "Escape") this.#choose(-1);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  #point(event) {
    if (!this.x) return;
    const at = (this.bars ?? []).findIndex((bars) => bars.some(({ start, end }) =>
      event.offsetX >= this.x(start) && event.offsetX <= this.x(end)));
    if (at !== this.chosen) this.#choose(at);
  }

  #choose(at) {
    this.chosen = at;
    this.#draw();
  }

  // Details of the chosen round as text.
  #tell() {
    const round = this.rounds[this.chosen];
    if (!round) { setText(this.note, ""); return; }
    const each = this.bars[this.chosen].map(({ member, seconds, reported }) => {
      if (!reported) return `${this.label(member)} took ${duration(seconds[2])}`;
      const parts = PHASES.map(([, text], at) => [text, seconds[at]]).filter(([, s]) => s > 0)
        .map(([text, s]) => `${text} ${duration(s)}`);
      return `${this.label(member)} ${parts.join(", ")}`;
    });
    setText(this.note, `Round ${round.round}, ${round.committed ? "committed" : `aborted: ${round.reason}`}. ${each.join("; ")}.`);
  }
}

// Phases of each member before and after the verdict; without its report only the exchange.
function barsOf({ timeline, time, seconds, members, contributors, committed }) {
  if (!timeline?.length) {
    return (committed ? contributors : members).map((member) => ({
      member, committed, reported: false, seconds: [0, 0, seconds, 0, 0], start: time - seconds, end: time,
    }));
  }
  return timeline.map((row) => {
    const each = PHASES.map(([name]) => Math.max(0, row[name] ?? 0));
    const before = each.slice(0, 4).reduce((a, b) => a + b, 0);
    return { member: row.member, committed, reported: true, seconds: each, start: time - before, end: time + each[4] };
  });
}
