// Data of the shown job: its view, curves, rounds, events and lines.

import { Curves } from "../lib/curves.js";
import { get } from "../lib/client.js";
import { LearningCurves } from "../lib/learning_curves.js";
import { nameOf } from "../lib/store.js";

const MAX_ROUNDS = 600;
const MAX_EVENTS = 1000;
const MAX_LINES = 2000;
const FIRST_POINTS = 500;

export class JobData {
  constructor(name) {
    this.name = name;
    this.view = null;
    this.worth = null;
    this.curves = new Curves();
    this.learning = new LearningCurves();
    this.rounds = [];
    this.events = [];
    this.lines = [];
    this.last = { points: 0, events: 0, lines: 0 };
    this.changed = { points: true, rounds: true, events: true, lines: true, worth: true };
  }

  // The thinned history; the stream continues from there.
  async load() {
    const found = await get("api/history", { job: this.name, points: FIRST_POINTS });
    if (!found) return;
    this.view = found.view;
    this.#measure(found.points);
    this.last.points = found.last;
    this.changed.points = true;
  }

  // Add a tick; repeats after a reconnect are recognized by their ids.
  add(tick) {
    if (tick.job) this.view = tick.job;
    if (tick.worth) { this.worth = tick.worth; this.changed.worth = true; }
    this.#measure(this.#news(tick, "points"));
    if (tick.rounds?.length) this.#addRounds(tick.rounds);
    this.events = [...this.events, ...this.#news(tick, "events")].slice(-MAX_EVENTS);
    this.fresh = this.#news(tick, "lines");
    this.lines = [...this.lines, ...this.fresh].slice(-MAX_LINES);
  }

  #measure(points) {
    this.curves.add(points);
    this.learning.add(points);
  }

  // A round may be sent again, because more is known of it after its members' next join.
  #addRounds(rounds) {
    const ids = new Set(rounds.map(({ id }) => id));
    this.rounds = [...this.rounds.filter(({ id }) => !ids.has(id)), ...rounds]
      .sort((a, b) => a.id - b.id).slice(-MAX_ROUNDS);
    this.changed.rounds = true;
  }

  #news(tick, name) {
    const news = (tick[name] ?? []).filter((item) => item.id > this.last[name]);
    if (news.length) {
      this.last[name] = news.at(-1).id;
      this.changed[name] = true;
    }
    return news;
  }

  // Whether something is new since the last call.
  take(name) {
    const was = this.changed[name];
    this.changed[name] = false;
    return was;
  }

  // The machine of a member, with the member where a machine has several; of a follower too.
  labelOf(owner) {
    const follower = this.view?.followers?.find(({ member }) => member === owner);
    return follower ? `${follower.node} (${owner})` : nameOf(this.view, owner);
  }
}
