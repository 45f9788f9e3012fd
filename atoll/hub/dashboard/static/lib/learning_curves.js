// Measurements of policies and critic, by name and member, against environment steps or time.

import { Series } from "./series.js";

const KINDS = ["return", "explained_variance", "env_steps_per_s"];
const LOSS = "value_loss.";

export class LearningCurves {
  constructor() { this.series = new Series(["step", "time"]); }

  add(points) {
    for (const { member, step, time, values } of points) {
      for (const kind of KINDS) {
        if (values[kind] != null) this.#push(kind, member, values.env_steps ?? step, time, values[kind]);
      }
      if (values.value_loss != null && values.env_steps != null) { // an actor with its own critic
        this.#push("value_loss", member, values.env_steps, time, values.value_loss);
      }
      for (const name of Object.keys(values)) {
        if (name.startsWith(LOSS)) this.#push("value_loss", name.slice(LOSS.length), step, time, values[name]);
      }
    }
  }

  #push(kind, owner, step, time, value) {
    this.series.push(kind, owner, [step, time], value);
  }

  // Curves of one kind by policy in job-file order, with the mean of their last values.
  byPolicy(roles, kind) {
    const found = new Map();
    roles.forEach(({ role, policy }, slot) => {
      const curve = role === "actor" && this.of(kind, `w${slot}`);
      if (curve) found.set(policy, [...(found.get(policy) ?? []), curve]);
    });
    return [...found].map(([policy, curves]) => (
      { policy, curves, last: curves.reduce((sum, { y }) => sum + y.at(-1), 0) / curves.length }));
  }

  owners(kind) { return this.series.of(kind).map(({ owner }) => owner); }

  // The mean of the owners' last values; null if there are none.
  last(kind) {
    const ends = this.series.of(kind).map(({ y }) => y.at(-1));
    return ends.length ? ends.reduce((a, b) => a + b, 0) / ends.length : null;
  }

  of(kind, owner) { return this.series.get(kind, owner); }
}

// The policies of a job in job-file order, each with its actors.
export function policiesOf({ roles = [], members }) {
  const found = new Map();
  roles.forEach(({ role, policy, env, steps }, slot) => {
    if (role !== "actor") return;
    const known = found.get(policy) ?? { policy, env, steps, at: found.size, members: [] };
    found.set(policy, known);
    const member = members.find((one) => one.slot === slot);
    if (member) known.members.push(member);
  });
  return [...found.values()];
}

// The member that is the critic, or the learner, of all policies.
export function criticOf({ roles = [], members }) {
  const slot = roles.findIndex(({ role }) => role !== "actor");
  return slot < 0 ? null : members.find((one) => one.slot === slot) ?? null;
}
