// A table that is updated often: keyed rows, sortable columns, navigation by arrow keys.

import { element, setText } from "./dom.js";
import { NONE } from "./format.js";

// columns: {name, value(row) -> text or element, align, sort(row) -> number or text, hint, live:
// updated at every tick, optional: hidden while no row has a value to sort by}
export class Table {
  constructor({ label, columns, key, rowClass = () => "", sortBy = "", cards = false, limit = 500 }) {
    this.columns = columns;
    this.key = key;
    this.rowClass = rowClass;
    this.limit = limit;
    this.sorting = { name: sortBy, down: false };
    this.rows = new Map();
    this.data = [];
    this.heads = columns.map((column) => this.#head(column));
    this.body = element("tbody", { keydown: (event) => this.#walk(event) });
    this.table = element("table", { class: cards ? "cards" : null },
      element("caption", { class: "hidden" }, label),
      element("thead", null, element("tr", null, ...this.heads)), this.body);
    this.element = element("div", {
      class: "scroll", role: "region", "aria-label": label, tabindex: "0",
    }, this.table);
    this.#showSorting();
  }

  show(data) {
    this.data = data;
    const rows = this.#sorted(data).slice(0, this.limit);
    this.left = this.columns.map(({ optional, sort }) => Boolean(optional) && !data.some((row) => sort(row) != null));
    this.heads.forEach((head, at) => { head.hidden = this.left[at]; });
    const keys = new Set(rows.map(this.key));
    for (const [name, { line }] of this.rows) {
      if (!keys.has(name)) { line.remove(); this.rows.delete(name); }
    }
    rows.forEach((row, at) => {
      const line = this.#line(row);
      if (this.body.children[at] !== line) this.body.insertBefore(line, this.body.children[at] ?? null);
    });
  }

  #line(row) {
    const name = this.key(row);
    let known = this.rows.get(name);
    if (!known) {
      const line = element("tr", null, ...this.columns.map((column) =>
        element("td", { class: column.align, "data-name": column.name })));
      known = { line, row: null };
      this.rows.set(name, known);
    }
    this.left.forEach((left, at) => { known.line.cells[at].hidden = left; });
    if (known.row === row && !this.columns.some((column) => column.live)) return known.line;
    const wanted = this.rowClass(row);
    if (known.line.className !== wanted) known.line.className = wanted;
    this.columns.forEach((column, at) => {
      if (known.row !== row || column.live) this.#cell(known.line.cells[at], column.value(row));
    });
    known.row = row;
    return known.line;
  }

  #cell(cell, content) {
    const text = content?.textContent ?? content ?? "";
    const field = content instanceof Element && content.matches("input");
    cell.classList.toggle("none", !field && (text === NONE || text === ""));
    if (!(content instanceof Node)) { setText(cell, content ?? ""); return; }
    const shown = cell.firstElementChild;
    if (shown && cell.childNodes.length === 1 && shown.outerHTML === content.outerHTML) return;
    const focused = cell.contains(document.activeElement);
    cell.replaceChildren(content);
    if (focused) cell.querySelector("a, button")?.focus();
  }

  #head(column) {
    const inside = column.sort
      ? element("button", { type: "button", class: "sort", click: () => this.#sortBy(column) }, column.name)
      : column.name;
    return element("th", { scope: "col", class: column.align, title: column.hint }, inside);
  }

  #sortBy({ name }) {
    this.sorting = { name, down: this.sorting.name === name && !this.sorting.down };
    this.#showSorting();
    this.show(this.data);
  }

  #showSorting() {
    this.columns.forEach(({ name, sort }, at) => {
      if (!sort) return;
      const mine = name === this.sorting.name;
      this.heads[at].setAttribute("aria-sort",
        mine ? (this.sorting.down ? "descending" : "ascending") : "none");
    });
  }

  #sorted(data) {
    const column = this.columns.find(({ name, sort }) => sort && name === this.sorting.name);
    if (!column) return data;
    const sign = this.sorting.down ? -1 : 1;
    return [...data].sort((a, b) => sign * compare(column.sort(a), column.sort(b)));
  }

  // Up and down move between rows, on the same kind of link or button.
  #walk(event) {
    const steps = { ArrowDown: 1, ArrowUp: -1, Home: -Infinity, End: Infinity };
    const step = steps[event.key];
    const row = event.target.closest("tr");
    if (!step || !row || !event.target.matches("a, button")) return;
    const at = [...row.querySelectorAll("a, button")].indexOf(event.target);
    const lines = [...this.body.rows];
    const wanted = Math.max(0, Math.min(lines.length - 1, lines.indexOf(row) + step));
    event.preventDefault();
    [...lines[wanted].querySelectorAll("a, button")].at(at)?.focus();
  }
}

function compare(a, b) {
  if (a == null || b == null) return (a == null) - (b == null);
  return typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b;
}
