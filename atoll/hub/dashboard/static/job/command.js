// Overview of a command or a container: its exit, its output and what it leaves.

import { card, element, empty, link, pill } from "../lib/dom.js";
import { bytes, NONE } from "../lib/format.js";
import { get, path } from "../lib/client.js";
import { memberState } from "../lib/store.js";
import { Table } from "../lib/table.js";
import { fileAddress, purpose } from "./files.js";
import { OutputPart } from "./output.js";

const REFRESH_MS = 5000;

export class CommandPart {
  constructor(store, data) {
    this.data = data;
    this.output = new OutputPart(store, data);
    this.processes = new Table({ label: "Processes", columns: PROCESSES, key: (row) => row.member, cards: true });
    this.artifacts = new Table({
      label: "Artifacts", key: (row) => row.name, columns: [
        { name: "File", align: "first wrap", value: ({ name }) => link(fileAddress(data.name, name), name, { download: name.split("/").at(-1) }) },
        { name: "Size", align: "right", value: ({ nbytes }) => bytes(nbytes) },
      ],
    });
    this.none = empty("None. A job keeps the files that it names:", "artifacts = [\"results/*\"] in [job]");
    this.element = element("div", { class: "stackview" },
      card("Exit", this.processes.element), this.output.element, card("Artifacts", this.none, this.artifacts.element));
    this.timer = setInterval(() => this.#load(), REFRESH_MS);
    this.#load();
  }

  update() {
    this.processes.show(this.data.view.members);
    this.output.update();
  }

  async #load() {
    const found = (await get(path("jobs", this.data.name, "files")) ?? []).filter(({ name }) => !purpose(name) && !this.data.view?.files.includes(name)); // what the job left
    this.none.hidden = found.length > 0;
    this.artifacts.element.hidden = !found.length;
    this.artifacts.show(found);
  }

  close() {
    clearInterval(this.timer);
    this.output.close();
  }
}

const PROCESSES = [
  { name: "Machine", align: "first", value: ({ node }) => link(`#/fleet/${encodeURIComponent(node)}`, node) },
  { name: "State", value: (row) => pill(memberState(row)) },
  { name: "Exit status", align: "right", value: ({ exit_code: code }) => code ?? NONE },
  { name: "Launches", align: "right", value: ({ attempt }) => attempt },
  { name: "Problem", align: "text", value: ({ error }) => error?.what ?? "" },
];
