// What policies and their critic measured, by name and member, against environment steps or time.

const MAX_POINTS = 4000;
const KINDS = ["return", "explained_variance", "env_steps_per_s"];
const LOSS = "value_loss.";

export class LearningCurves {
  constructor() { this.byName = new Map(); }

  add(points) {
    for (const { member, step, time, values } of points) {
      for (const kind of KINDS) {
        if (values[kind] != null) this.#push(kind, member, values.env_steps ?? step, time, values[kind]);
      }
      if (values.value_loss != null && values.env_steps != null) { // of an actor with a critic of its own
        this.#push("value_loss", member, values.env_steps, time, values.value_loss);
      }
      for (const name of Object.keys(values)) {
        if (name.startsWith(LOSS)) this.#push("value_loss", name.slice(LOSS.length), step, time, values[name]);
      }
    }
  }

  #push(kind, owner, step, time, value) {
    const key = `${kind}/${owner}`;
    const curve = this.byName.get(key) ?? { kind, owner, step: [], time: [], y: [] };
    this.byName.set(key, curve);
    curve.step.push(step);
    curve.time.push(time);
    curve.y.push(value);
    if (curve.y.length > MAX_POINTS) thin(curve);
  }

  // The curves of one kind by policy, in the order of the job file, with the mean of their last values.
  byPolicy(seats, kind) {
    const found = new Map();
    seats.forEach(({ role, policy }, slot) => {
      const curve = role === "actor" && this.of(kind, `w${slot}`);
      if (curve) found.set(policy, [...(found.get(policy) ?? []), curve]);
    });
    return [...found].map(([policy, curves]) => (
      { policy, curves, last: curves.reduce((sum, { y }) => sum + y.at(-1), 0) / curves.length }));
  }

  // Whose curves of one kind there are.
  owners(kind) {
    return [...this.byName.values()].filter((curve) => curve.kind === kind).map(({ owner }) => owner);
  }

  // The mean of the last values of all that told one; null: nobody did.
  last(kind) {
    const ends = [...this.byName.values()].filter((curve) => curve.kind === kind).map(({ y }) => y.at(-1));
    return ends.length ? ends.reduce((a, b) => a + b, 0) / ends.length : null;
  }

  of(kind, owner) { return this.byName.get(`${kind}/${owner}`) ?? null; }
}

// Long curves lose every second point of their older half.
function thin(curve) {
  const keep = (_, at) => at > MAX_POINTS / 2 || at % 2 === 0;
  for (const name of ["step", "time", "y"]) curve[name] = curve[name].filter(keep);
}

// The policies of a job in the order of its file, each with its actors.
export function policiesOf({ seats = [], members }) {
  const found = new Map();
  seats.forEach(({ role, policy, env, steps }, slot) => {
    if (role !== "actor") return;
    const known = found.get(policy) ?? { policy, env, steps, at: found.size, members: [] };
    found.set(policy, known);
    const member = members.find((one) => one.slot === slot);
    if (member) known.members.push(member);
  });
  return [...found.values()];
}

// The member that is the critic or the learner of everybody.
export function criticOf({ seats = [], members }) {
  const slot = seats.findIndex(({ role }) => role !== "actor");
  return slot < 0 ? null : members.find((one) => one.slot === slot) ?? null;
}
