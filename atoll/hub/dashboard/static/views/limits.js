// Limits: who uses how much of what, reached ones first and red.

import { get } from "../lib/client.js";
import { bar, element, empty, link, pill, setText } from "../lib/dom.js";
import { bytes, count, moment, NONE, plural } from "../lib/format.js";
import { Table } from "../lib/table.js";

export class LimitsCard {
  constructor() {
    this.table = new Table({
      label: "Limits", columns: COLUMNS, key: (row) => `${row.kind} ${row.who}`, cards: true,
      rowClass: ({ reached }) => (reached ? "critical" : ""),
    });
    this.none = empty("Nothing is in use.");
    this.more = element("p", { class: "quiet", hidden: "" });
    this.element = element("section", { class: "card", "aria-labelledby": "limits-title" },
      element("h2", { id: "limits-title" }, "Limits"),
      element("p", { class: "quiet" }, "How much each token, node and job uses of what it may use, the fullest first. The hub's owner sets limits in quotas.toml."),
      this.none, this.table.element, this.more);
  }

  async load() {
    const found = await get("api/limits");
    if (!found) return;
    const rows = found.uses;
    this.none.hidden = rows.length > 0;
    this.table.element.hidden = rows.length === 0;
    this.table.show(rows);
    const left = found.number - rows.length;
    this.more.hidden = left <= 0;
    setText(this.more, `and ${left} more: atoll limits --all`);
  }
}

const figure = (row, value) => (row.in_bytes ? bytes(value) : count(value));
const share = ({ used, limit }) => (limit ? (100 * used) / limit : 0);

const COLUMNS = [
  { name: "Who", align: "first wrap", value: who, sort: (row) => row.who },
  { name: "Limit", align: "wrap", value: (row) => element("span", { title: row.text }, row.kind.replaceAll("_", " ")), sort: (row) => row.kind },
  { name: "Used", align: "right", value: (row) => figure(row, row.used), sort: (row) => row.used },
  { name: "Of", align: "right", value: (row) => (row.limit ? figure(row, row.limit) : "any"), sort: (row) => row.limit },
  { name: "Share", value: (row) => (row.limit ? bar(Math.min(100, share(row)), { text: percent(share(row)), name: row.text }) : NONE), sort: share },
  { name: "Refused", align: "wrap", value: refused, sort: (row) => row.refused },
];

function who({ role, name, member, who: text }) {
  if (role === "job") return link(`#/jobs/${encodeURIComponent(name)}`, member ? `${name}/${member}` : name);
  if (role === "node") return link(`#/fleet/${encodeURIComponent(name)}`, name);
  return text;
}

function percent(value) {
  return value > 0 && value < 1 ? "< 1 %" : `${Math.round(value)} %`;
}

function refused({ refused: times, refused_at: at, reached }) {
  if (!times) return reached ? pill("reached", "bad") : NONE;
  return element("span", { class: reached ? "bad" : null }, `${plural(times, "time")}, last ${moment(at)}`);
}
