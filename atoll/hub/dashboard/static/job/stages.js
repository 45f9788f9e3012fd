// Stages of a SWARM: who serves them, how fast, what waits, and who moved where and why.

import { bar, element, fill, link, pill, setText } from "../lib/dom.js";
import { bytes, count, moment } from "../lib/format.js";

const SHOWN_MOVES = 8;

export class StagesCard {
  constructor() {
    this.figures = element("span", { class: "quiet" });
    this.list = element("ol", { class: "stages" });
    this.rest = element("p", { class: "quiet" });
    this.movesTitle = element("h3", null, "Changes of places");
    this.moves = element("ol", { class: "moves" });
    this.stages = [];
    this.element = element("section", { class: "card", id: "stages", "aria-labelledby": "stages-title" },
      element("div", { class: "head" }, element("h2", { id: "stages-title" }, "Stages"), this.figures),
      this.list, this.rest, this.movesTitle, this.moves);
    this.element.hidden = true;
  }

  show(swarm) {
    this.element.hidden = !swarm;
    if (!swarm) return;
    setText(this.figures, [
      `step ${count(swarm.step)}`, `${speed(swarm.microbatches_per_s)} microbatches/s`,
      swarm.to_measure ? `held-out ${swarm.measured}/${swarm.to_measure}` : "",
    ].filter(Boolean).join(" · "));
    while (this.stages.length < swarm.stages.length) {
      const made = new Stage(this.stages.length);
      this.stages.push(made);
      this.list.append(made.element);
    }
    swarm.stages.forEach((stage, at) => this.stages[at].show(stage, swarm.microbatches));
    const rest = [
      swarm.whole.length ? `whole model: ${swarm.whole.join(", ")}` : "",
      swarm.coming.length ? `no stage fits: ${swarm.coming.join(", ")}` : "",
    ].filter(Boolean).join(" · ");
    setText(this.rest, rest);
    this.rest.hidden = !rest;
    this.movesTitle.hidden = this.moves.hidden = !swarm.moves.length;
    fill(this.moves, ...swarm.moves.slice(-SHOWN_MOVES).reverse().map(moved));
  }
}

class Stage {
  constructor(number) {
    this.head = element("div", { class: "head" });
    this.done = element("div", { class: "done" });
    this.peers = element("ul", { class: "peers" });
    this.known = new Map();
    this.element = element("li", { class: "stage", "aria-label": `Stage ${number}` },
      this.head, this.done, this.peers);
  }

  show(stage, microbatches) {
    const { peers } = stage;
    const needs = stage.needs_bytes ? `needs ${bytes(stage.needs_bytes)}` : "";
    const rows = stage.rows_per_s == null ? "" : `${speed(stage.rows_per_s)} rows/s`;
    fill(this.head, element("h3", null, `Stage ${stage.stage}`),
      stage.slowest ? pill("slowest", "warn") : null,
      peers.some(({ state }) => state !== "recovering") ? null : pill("no member", "bad"),
      element("span", { class: "quiet" }, [rows, needs].filter(Boolean).join(" · ")));
    fill(this.done, bar((100 * stage.counted) / microbatches, {
      name: "Microbatches of this step that count",
      text: `${stage.counted} of ${microbatches}${stage.agreed ? ", agreed" : ""}`,
    }));
    const names = new Set(peers.map(({ member, name }) => `${member} ${name}`));
    for (const [name, { line }] of this.known) {
      if (!names.has(name)) { line.remove(); this.known.delete(name); }
    }
    peers.forEach((peer, at) => {
      const name = `${peer.member} ${peer.name}`;
      if (!this.known.has(name)) this.known.set(name, peerLine(peer));
      const { line, state, figures } = this.known.get(name);
      if (this.peers.children[at] !== line) this.peers.insertBefore(line, this.peers.children[at] ?? null);
      fill(state, pill(peer.state));
      fill(figures, ...figuresOf(peer));
    });
  }
}

function peerLine({ name, node }) {
  const state = element("span");
  const figures = element("span", { class: "figures" });
  const who = node ? link(`#/fleet/${encodeURIComponent(node)}`, name) : name;
  const line = element("li", null, element("span", { class: "who" }, element("b", null, who)), state, figures);
  return { line, state, figures };
}

function figuresOf(peer) {
  const share = peer.share == null ? null : 100 * peer.share;
  return [
    share == null ? null : bar(share, { name: "Share of the paths through this stage" }),
    element("span", null, peer.rows_per_s == null ? "speed unknown" : `${speed(peer.rows_per_s)} rows/s`),
    element("span", { title: "Microbatches that wait at it" }, `queue ${count(peer.queue)}`),
    element("span", { title: peer.accepts ? "Others can connect to it" : "Others cannot connect to it" },
      peer.direct == null ? "sent nothing" : `${Math.round(100 * peer.direct)} % direct`),
    peer.failures ? element("span", { class: "bad", title: peer.last_failure || null }, `failed ${peer.failures}×`) : null,
  ];
}

function moved({ time, name, source, target, reason }) {
  return element("li", null, element("time", null, moment(time)),
    element("span", null, element("b", null, name), `: stage ${source} → ${target}`, reason ? `, ${reason}` : ""));
}

function speed(value) {
  return value >= 10 || value === 0 ? String(Math.round(value)) : value.toPrecision(2);
}
