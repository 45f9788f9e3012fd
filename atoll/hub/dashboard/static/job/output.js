// Output of a job's processes: followed live, or searched on the hub.

import { element, setText } from "../lib/dom.js";
import { moment } from "../lib/format.js";
import { get, path } from "../lib/client.js";

const MAX_LINES = 2000;
const FOUND = 1000;
const PAUSE_MS = 300;

export class OutputPart {
  constructor(store, data) {
    this.data = data;
    this.member = "";
    this.text = "";
    this.requests = 0;
    this.members = element("select", { id: "log-member", change: (event) => { this.member = event.target.value; this.#again(); } },
      element("option", { value: "" }, "all machines"));
    this.search = element("input", {
      id: "log-search", type: "search", placeholder: "Search all output", "data-search": "", maxlength: 200,
      input: () => { clearTimeout(this.timer); this.timer = setTimeout(() => this.#again(), PAUSE_MS); },
    });
    this.follow = element("input", { type: "checkbox", checked: "", id: "log-follow" });
    this.note = element("span", { class: "quiet", role: "status" });
    this.log = element("pre", { class: "output", tabindex: "0", role: "log", "aria-live": "off", "aria-label": "Output", id: "log" });
    this.element = element("section", { class: "card", "aria-labelledby": "output-title" },
      element("div", { class: "head" }, element("h2", { id: "output-title" }, "Output"), this.note,
        element("span", { class: "space" }),
        element("label", { class: "filter" }, this.follow, " follow"),
        element("label", { class: "filter" }, element("span", { class: "hidden" }, "Machine"), this.members),
        element("label", { class: "filter" }, element("span", { class: "hidden" }, "Search the output"), this.search)),
      this.log);
    this.#again();
  }

  update() {
    this.#showMembers();
    if (this.text || !this.data.take("lines")) return;
    const news = this.data.lines.filter(({ id }) => id > this.last);
    if (news.length) this.#write(news);
  }

  #showMembers() {
    const { members = [], followers = [] } = this.data.view ?? {};
    const names = [...members, ...followers].map(({ member }) => member);
    this.members.hidden = names.length < 2;
    const known = [...this.members.options].slice(1).map(({ value }) => value);
    if (names.join() === known.join()) return;
    this.members.replaceChildren(this.members.options[0], ...names.map((name) => element("option", { value: name }, this.data.labelOf(name))));
    this.members.value = this.member;
  }

  // Reload after a change of member or search text.
  async #again() {
    this.text = this.search.value.trim() ? this.search.value : "";
    const request = this.requests += 1;
    if (!this.text) {
      this.log.replaceChildren();
      this.last = 0;
      setText(this.note, "");
      this.#write(this.data.lines);
      return;
    }
    setText(this.note, "searching…");
    const found = await get(path("jobs", this.data.name, "logs"), { tail: FOUND, q: this.text, member: this.member });
    if (request !== this.requests) return;
    // A hub without search returns every line.
    const low = this.text.toLowerCase();
    const lines = (found?.lines ?? []).filter(({ text }) => text.toLowerCase().includes(low));
    setText(this.note, lines.length === FOUND ? `the last ${FOUND} lines with it` : `${lines.length} lines with it`);
    this.log.replaceChildren();
    this.#write(lines);
  }

  #write(lines) {
    if (lines.length && !this.text) this.last = lines.at(-1).id;
    const wanted = lines.filter(({ member }) => !this.member || member === this.member);
    this.log.append(...wanted.map((line) => this.#line(line)));
    while (this.log.children.length > MAX_LINES) this.log.firstChild.remove();
    if (this.follow.checked) this.log.scrollTop = this.log.scrollHeight;
  }

  #line({ member, time, text }) {
    const { members = [], followers = [] } = this.data.view ?? {};
    const name = members.length + followers.length === 1 ? null : element("b", null, this.data.labelOf(member));
    const slot = Number.parseInt(member.slice(1), 10);
    if (name && !Number.isNaN(slot)) name.style.color = `var(--series-${slot % 8})`;
    return element("div", { title: moment(time) }, name, ...marked(text, this.text));
  }

  close() { clearTimeout(this.timer); }
}

// A line with the search text highlighted.
function marked(text, wanted) {
  if (!wanted) return [text];
  const parts = [];
  const low = text.toLowerCase(), find = wanted.toLowerCase();
  let from = 0;
  for (let at = low.indexOf(find); at >= 0; at = low.indexOf(find, from)) {
    parts.push(text.slice(from, at), element("mark", null, text.slice(at, at + find.length)));
    from = at + find.length;
  }
  return [...parts, text.slice(from)];
}
