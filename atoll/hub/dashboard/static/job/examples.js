// What a job is tuned on: the report of its data and some examples, from its file data.json.

import { element, fill } from "../lib/dom.js";
import { get, path } from "../lib/client.js";
import { fileAddress } from "./files.js";

const REFRESH_MS = 5000;
const FILE = "data.json";

export class ExamplesCard {
  constructor(data) {
    this.data = data;
    this.lines = element("ul", { class: "report-lines" });
    this.examples = element("div", { class: "examples" });
    this.element = element("section", { class: "card", id: "examples", "aria-labelledby": "examples-title" },
      element("div", { class: "head" }, element("h2", { id: "examples-title" }, "Data"),
        element("span", { class: "quiet" }, "underlined: trained on")),
      this.lines,
      element("details", null, element("summary", null, "Some examples"), this.examples));
    this.element.hidden = true;
  }

  // Looks for the file until it is there: the first member writes it when it has read the data.
  update() {
    if (this.timer || this.shown || !this.data.view?.tuned) return;
    this.timer = setInterval(() => this.#load(), REFRESH_MS);
    this.#load();
  }

  async #load() {
    const files = await get(path("jobs", this.data.name, "files"));
    if (this.shown || !files?.some(({ name }) => name === FILE)) return;
    const found = await get(fileAddress(this.data.name, FILE));
    if (found) this.show(found);
  }

  show({ sentences, headings, examples }) {
    this.close();
    this.shown = true;
    this.element.hidden = false;
    fill(this.lines, ...sentences.map((text) => element("li", null, text)));
    fill(this.examples, ...examples.map((answers, at) => element("div", { class: "example" },
      ...answers.map((stretches, number) => element("div", null,
        headings?.[at]?.[number] ? element("h3", null, headings[at][number]) : null,
        element("pre", { class: "output", tabindex: "0", "aria-label": "Example" },
          ...stretches.map(([text, trained]) => (trained ? element("u", null, text) : text))))))));
  }

  close() {
    clearInterval(this.timer);
    this.timer = null;
  }
}
