// Curves by kind and owner, thinned in one place.

const MAX_POINTS = 1600; // per curve; so many are drawn without delay
const MIN_POINTS = 200;
const MAX_TOTAL = 200_000; // of all curves of a job: a few megabytes

export class Series {
  // axes: names of possible x axes, e.g. ["step", "time"].
  constructor(axes) {
    this.axes = axes;
    this.byName = new Map();
  }

  // at: one number per axis. `replace`: a value at the same first axis replaces the last one.
  push(kind, owner, at, value, { replace = false } = {}) {
    const curve = this.get(kind, owner) ?? this.#make(kind, owner);
    if (replace && curve[this.axes[0]].at(-1) === at[0]) {
      curve.y[curve.y.length - 1] = value;
      return;
    }
    this.axes.forEach((axis, place) => curve[axis].push(at[place]));
    curve.y.push(value);
    const limit = Math.max(MIN_POINTS, Math.min(MAX_POINTS, MAX_TOTAL / this.byName.size));
    if (curve.y.length > limit) this.#thin(curve);
  }

  get(kind, owner) { return this.byName.get(`${kind}/${owner}`) ?? null; }

  // Curves of some kinds, ordered by owner.
  of(...kinds) {
    return [...this.byName.values()]
      .filter((curve) => kinds.includes(curve.kind))
      .sort((a, b) => a.owner.localeCompare(b.owner, "en", { numeric: true }));
  }

  kinds() { return new Set([...this.byName.values()].map(({ kind }) => kind)); }

  #make(kind, owner) {
    const curve = { kind, owner, y: [], ...Object.fromEntries(this.axes.map((axis) => [axis, []])) };
    this.byName.set(`${kind}/${owner}`, curve);
    return curve;
  }

  // Drops every second point of the older half: the past becomes coarser, not shorter.
  #thin(curve) {
    const half = curve.y.length / 2;
    for (const name of [...this.axes, "y"]) {
      curve[name] = curve[name].filter((_, at) => at > half || at % 2 === 0);
    }
  }
}
