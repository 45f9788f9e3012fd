// Points of a job by curve: every reported value against step, tokens or time.

import { Series } from "./series.js";

const MAX_SHARES = 4000;

export class Curves {
  constructor() {
    this.series = new Series(["step", "tokens", "time"]);
    this.tokens = new Map();
    this.shares = new Map();
    this.before = new Map();
    this.members = new Set();
  }

  add(points) {
    for (const point of points) {
      const { member, values } = point;
      this.members.add(member);
      if (values.tokens != null) this.tokens.set(member, values.tokens);
      if (values.held_out_tokens) this.#share(point);
      if (values.held_out_loss != null) this.#push("held-out", "held_out", point, values.held_out_loss);
      // A member that trains several paths by turns does the same steps for each.
      const path = values.path == null ? member : `path ${values.path}`;
      for (const [name, value] of Object.entries(values)) {
        if (Number.isFinite(value)) this.#push(name === "loss" ? path : member, name, point, value);
      }
      if (values.wall_s != null) this.#rates(point);
    }
  }

  // Members evaluate parts of the held-out text at the same step; their losses are combined.
  #share(point) {
    const { step, values } = point;
    const [sum, tokens] = this.shares.get(step) ?? [0, 0];
    const both = [sum + values.held_out_loss_sum, tokens + values.held_out_tokens];
    this.shares.set(step, both);
    if (this.shares.size > MAX_SHARES) this.shares.delete(this.shares.keys().next().value);
    this.#push("held-out", "held_out", point, both[0] / both[1]);
  }

  // Counters become rates between two points of a member: busy seconds and bytes.
  #rates(point) {
    const { member, values } = point;
    const before = this.before.get(member);
    this.before.set(member, point);
    const wall = before && values.wall_s - before.values.wall_s;
    const seconds = before && point.time - before.time;
    if (!(wall > 0) || !(seconds > 0)) return;
    const grown = (name) => Math.max(0, (values[name] ?? 0) - (before.values[name] ?? 0));
    this.#push(member, "utilisation", point, Math.min(100, (100 * grown("compute_s")) / wall));
    this.#push(member, "bytes", point, (grown("sent_bytes") + grown("received_bytes")) / seconds);
  }

  #push(owner, kind, { member, step, time }, value) {
    const at = [step, this.tokens.get(member) ?? 0, time];
    this.series.push(kind, owner, at, value, { replace: kind === "held_out" });
  }

  of(...kinds) { return this.series.of(...kinds); }

  // Names of all curves.
  kinds() { return this.series.kinds(); }

  // The step at a time, to place the mark of an event.
  stepAt(time) {
    let best = 0;
    for (const curve of this.of("loss")) {
      const at = curve.time.findLastIndex((moment) => moment <= time);
      if (at >= 0) best = Math.max(best, curve.step[at]);
    }
    return best;
  }

  // One curve over all members in `bins` intervals of x: mean or sum over members.
  whole(kind, axis, { bins = 240, sum = false } = {}) {
    const curves = this.of(kind);
    const ends = curves.map((curve) => curve[axis].at(-1) ?? 0);
    const starts = curves.map((curve) => curve[axis][0] ?? 0);
    const low = Math.min(...starts);
    const width = (Math.max(...ends) - low) / bins || 1;
    const cells = new Map();
    curves.forEach((curve, member) => curve.y.forEach((value, at) => {
      const bin = Math.min(bins - 1, Math.floor((curve[axis][at] - low) / width));
      const cell = cells.get(bin) ?? new Map();
      cells.set(bin, cell);
      const [total, count, place] = cell.get(member) ?? [0, 0, 0];
      cell.set(member, [total + value, count + 1, place + curve[axis][at]]);
    }));
    const x = [], y = [];
    for (const [, cell] of [...cells].sort(([a], [b]) => a - b)) {
      const members = [...cell.values()];
      const means = members.map(([total, count]) => total / count);
      const all = means.reduce((a, b) => a + b, 0);
      x.push(members.reduce((a, [, count, place]) => a + place / count, 0) / members.length);
      y.push(sum ? all : all / means.length);
    }
    return { x, y };
  }

  last(kind) {
    const values = this.of(kind).map((curve) => curve.y.at(-1));
    return values.length ? values.reduce((a, b) => a + b, 0) / values.length : null;
  }
}
