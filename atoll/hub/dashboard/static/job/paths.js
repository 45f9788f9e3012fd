// Paths of a modular model: levels and modules with who holds them, and every path with its data.

import { bar, element, fill, link, pill, setText } from "../lib/dom.js";
import { NONE, count, few, loss, plural, ranges } from "../lib/format.js";
import { Table } from "../lib/table.js";

export class PathsCard {
  constructor() {
    this.figures = element("span", { class: "quiet" });
    this.levels = element("ol", { class: "levels" });
    this.shards = element("p");
    this.most = 1;
    this.table = new Table({
      label: "Paths", key: ({ path }) => path, cards: true, sortBy: "Path",
      columns: COLUMNS((documents) => (100 * documents) / this.most),
    });
    this.element = element("section", { class: "card", id: "paths", "aria-labelledby": "paths-title" },
      element("div", { class: "head" }, element("h2", { id: "paths-title" }, "Paths"), this.figures),
      this.levels, this.shards, this.table.element);
    this.element.hidden = true;
  }

  show(paths) {
    this.element.hidden = !paths;
    if (!paths) return;
    const all = paths.paths;
    setText(this.figures, [
      `phase ${count(paths.phase)} of ${count(paths.phases)}`,
      `${paths.modules.join(" × ")} modules${paths.copies > 1 ? `, ${paths.copies} copies` : ""}`,
      plural(all.length, "path"),
    ].join(" · "));
    fill(this.levels, ...paths.levels.map(levelRow));
    const sharded = all.filter(({ documents }) => documents != null);
    const documents = sharded.reduce((sum, path) => sum + path.documents, 0);
    const empty = paths.empty.length ? [" · ", pill(`empty shards: ${few(ranges(paths.empty), 20)}`, "bad")] : [];
    fill(this.shards, ...sharded.length
      ? [`${count(documents)} documents in ${plural(all.length, "shard")}`, ...empty]
      : ["Blocks of the corpus are dealt evenly to the paths."]);
    this.most = Math.max(1, ...sharded.map((path) => path.documents));
    this.table.element.classList.toggle("tall", all.length > 40);
    this.table.show(all);
  }
}

function levelRow(modules, level) {
  return element("li", { "aria-label": `Level ${level}` },
    element("h3", null, `Level ${level}`), element("ul", { class: "modules" }, ...modules.map(moduleBox)));
}

function moduleBox({ module, paths, holders, round }) {
  const ended = round == null;
  const missing = ended ? "" : round ? "none: from the checkpoint" : "from the seed";
  const who = holders.length ? few(holders) : missing;
  return element("li", null,
    element("b", null, `Module ${module}`),
    element("span", { class: "quiet" }, ended ? "" : ` after ${plural(round, "round")}`),
    element("div", { class: "quiet" }, `${paths.length === 1 ? "path" : "paths"} ${few(ranges(paths))}`),
    who ? element("div", { class: holders.length || !round ? "who" : "who bad", title: holders.join(", ") }, who) : null);
}

const COLUMNS = (share) => [
  { name: "Path", align: "first", value: ({ path, modules }) => element("span", null, element("b", null, path), ` (${modules.join(", ")})`), sort: ({ path }) => path, hint: "Its number, and its module of each level" },
  { name: "Trained by", value: trainer, sort: ({ name }) => name },
  { name: "State", value: ({ state }) => pill(state, TONES[state]), sort: ({ state }) => state },
  { name: "Step", align: "right", value: ({ step }) => count(step), sort: ({ step }) => step },
  { name: "Tokens", align: "right", value: ({ tokens }) => count(tokens), sort: ({ tokens }) => tokens },
  { name: "Loss", align: "right", value: (path) => loss(path.loss), sort: (path) => path.loss, hint: "Training loss" },
  { name: "Held-out", align: "right", value: ({ held_out: held }) => loss(held), sort: ({ held_out: held }) => held, hint: "Loss on its own held-out documents" },
  { name: "Best", align: "right", value: best, sort: (path) => path.best, hint: "A path ends as it was when its held-out loss was least" },
  { name: "Documents", value: ({ documents }) => (documents == null ? NONE : bar(share(documents), { name: "Documents of its shard", text: count(documents) })), sort: ({ documents }) => documents, optional: true, live: true },
  { name: "Shard", align: "right", value: ({ shard_tokens: tokens }) => (tokens == null ? NONE : `${count(tokens)} tokens`), sort: ({ shard_tokens: tokens }) => tokens, optional: true },
];

const TONES = { training: "run", trained: "good", done: "good", lost: "bad", stopped: "warn", waiting: "" };

function trainer({ name, node }) {
  if (!name) return NONE;
  return element("b", null, node ? link(`#/fleet/${encodeURIComponent(node)}`, name) : name);
}

function best({ best: least, best_step: step, stopped_early: early }) {
  if (step == null) return NONE;
  const text = `${loss(least)} at ${count(step)}`;
  return early ? element("span", null, text, " ", pill("stopped early", "warn")) : text;
}
