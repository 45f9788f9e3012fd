// Files of a job to download: checkpoints, artifacts, the job file and the rest.

import { element, empty, fill, link, setText } from "../lib/dom.js";
import { bytes, moment, plural } from "../lib/format.js";
import { get, path } from "../lib/client.js";
import { isProgram } from "../lib/store.js";
import { Table } from "../lib/table.js";

const REFRESH_MS = 5000;

// What a file is for; empty: what the job itself left.
const PURPOSES = [
  [/^checkpoints\//, "part of a checkpoint"], [/^job\.toml$/, "job file"], [/^metrics\.jsonl$/, "every measurement"],
  [/^events\.jsonl$/, "every event"], [/^rounds\.json$/, "every round"], [/^data\.json$/, "preview of the data"], [/^summary\.json$/, "final figures"],
  [/^logs?\//, "output of a process"], [/\.log$/, "output of a process"], [/report\.html$/, "report for people"],
];

export function purpose(name) { return PURPOSES.find(([pattern]) => pattern.test(name))?.[1] ?? ""; }

export function fileAddress(job, name) {
  return `${path("jobs", job, "files")}/${name.split("/").map(encodeURIComponent).join("/")}`;
}

export class FilesPart {
  constructor(store, data) {
    this.data = data;
    this.checkpoints = new Table({
      label: "Checkpoints", key: (row) => row.name, columns: [
        { name: "Checkpoint", align: "first", value: (row) => row.name, sort: (row) => row.name },
        { name: "Parts", align: "right", value: (row) => row.parts },
        { name: "Size", align: "right", value: (row) => bytes(row.nbytes), sort: (row) => row.nbytes },
        { name: "Complete", value: (row) => (row.complete ? "yes" : "not yet") },
        { name: "Written", value: (row) => moment(row.modified), sort: (row) => row.modified },
      ],
    });
    const columns = [
        { name: "File", align: "first wrap", value: (row) => this.#link(row), sort: (row) => row.name },
        { name: "Purpose", value: ({ name }) => this.#purpose(name), sort: ({ name }) => this.#purpose(name) },
        { name: "Size", align: "right", value: (row) => bytes(row.nbytes), sort: (row) => row.nbytes },
        { name: "Written", value: (row) => moment(row.modified), sort: (row) => row.modified },
        { name: "SHA-256", optional: true, sort: (row) => row.sha256 || null, value: (row) => element("code", { title: row.sha256 }, row.sha256.slice(0, 12)) },
    ];
    this.files = new Table({ label: "Files", key: (row) => row.name, cards: true, sortBy: "File", columns });
    this.parts = new Table({ label: "Parts of checkpoints", key: (row) => row.name, cards: true, sortBy: "File", columns });
    this.summary = element("summary", null, "Parts");
    this.folded = element("details", { hidden: "" }, this.summary, this.parts.element);
    this.none = empty("No file yet.");
    this.noCheckpoint = empty("No checkpoint yet.");
    this.spec = element("pre", { class: "output", tabindex: "0", "aria-label": "Job file" });
    this.element = element("div", { class: "stackview" },
      this.saved = section("checkpoints-title", "Checkpoints", this.noCheckpoint, this.checkpoints.element, this.folded),
      section("files-title", "Files and artifacts", this.none, this.files.element),
      section("spec-title", "Job file, with every default", this.spec));
    this.timer = setInterval(() => this.#load(), REFRESH_MS);
    this.#load();
    this.#loadSpec();
  }

  #purpose(name) {
    return purpose(name) || (this.data.view?.files.includes(name) ? "sent with the job" : "left by the job");
  }

  #link({ name }) {
    return link(fileAddress(this.data.name, name), name, { download: name.split("/").at(-1) });
  }

  async #load() {
    const found = await get(path("jobs", this.data.name, "files"));
    if (!found) return;
    const groups = new Map();
    for (const file of found) {
      const [, name, part] = file.name.match(/^checkpoints\/([^/]+)\/(.+)$/) ?? [];
      if (!name) continue;
      const group = groups.get(name) ?? { name, parts: 0, nbytes: 0, modified: 0, complete: false };
      groups.set(name, group);
      group.parts += 1;
      group.nbytes += file.nbytes;
      group.modified = Math.max(group.modified, file.modified);
      group.complete ||= part === "manifest.json";
    }
    const { view } = this.data;
    this.saved.hidden = !groups.size && Boolean(view) && isProgram(view); // which has none
    this.noCheckpoint.hidden = groups.size > 0;
    this.checkpoints.element.hidden = groups.size === 0;
    this.checkpoints.show([...groups.values()].sort((a, b) => b.modified - a.modified));
    const parts = found.filter(({ name }) => name.startsWith("checkpoints/"));
    const rest = found.filter((file) => !parts.includes(file));
    this.none.hidden = rest.length > 0;
    this.files.element.hidden = !rest.length;
    this.files.show(rest);
    this.folded.hidden = !parts.length;
    setText(this.summary, `${plural(parts.length, "part")} of checkpoints`);
    this.parts.show(parts);
  }

  async #loadSpec() {
    const found = await get(path("jobs", this.data.name));
    if (found) fill(this.spec, found.spec);
  }

  update() {}

  close() { clearInterval(this.timer); }
}

function section(id, title, ...children) {
  return element("section", { class: "card", "aria-labelledby": id }, element("h2", { id }, title), ...children);
}
