// Members of a job: node, progress and errors.

import { element, link, pill } from "../lib/dom.js";
import { age, bytes, count, loss, NONE, percent } from "../lib/format.js";
import { memberState } from "../lib/store.js";
import { Table } from "../lib/table.js";

export class MembersPart {
  constructor(store, data) {
    this.data = data;
    this.table = new Table({ label: "Members", columns: COLUMNS, key: (row) => row.member, cards: true, rowClass: memberState });
    this.tails = element("div", { class: "stackview" });
    this.element = element("div", { class: "stackview" },
      element("section", { class: "card", "aria-labelledby": "members-title" },
        element("h2", { id: "members-title" }, "Members"), this.table.element),
      this.tails);
  }

  update() {
    const { members, followers = [] } = this.data.view;
    const processes = members.flatMap((member) => [member, ...followers.filter((one) => one.follower_of === member.member)]);
    this.table.show(processes);
    const troubled = processes.filter(({ tail, error }) => tail?.length || error);
    const signature = JSON.stringify(troubled.map(({ member, attempt, tail, error }) => [member, attempt, tail, error]));
    if (signature === this.signature) return;
    this.signature = signature;
    this.tails.replaceChildren(...troubled.map((one) => trouble(one, this.data.labelOf(one.member))));
  }

  close() {}
}

// The error of a member as text, and its last output.
function trouble({ member, error, tail, exit_code: code }, name) {
  const id = `trouble-${member}`;
  return element("section", { class: "card", "aria-labelledby": id },
    element("h3", { id }, name, code == null ? "" : ` ended with exit status ${code}`),
    error ? element("p", { class: "reason bad" }, [error.what, error.given, error.expected && `expected: ${error.expected}`, error.remedy].filter(Boolean).join(" · ")) : null,
    tail?.length ? element("pre", { class: "output short", tabindex: "0", "aria-label": `Last lines of ${name}` }, tail.join("\n")) : null);
}

const COLUMNS = [
  { name: "Machine", align: "first", value: (m) => link(`#/fleet/${encodeURIComponent(m.node)}`, m.node), sort: (m) => m.node },
  { name: "Member", value: (m) => m.member, sort: (m) => m.slot },
  { name: "State", value: (m) => pill(memberState(m)), sort: memberState },
  { name: "Step", align: "right", value: (m) => count(m.step), sort: (m) => m.step },
  { name: "Pace", align: "right", value: (m) => (m.pace ? percent(100 * m.pace) : "–"), sort: (m) => m.pace },
  { name: "Round", align: "right", value: (m) => m.round ?? NONE, sort: (m) => m.round },
  { name: "Loss", align: "right", value: (m) => loss(m.loss), sort: (m) => m.loss },
  { name: "Tokens/s", align: "right", value: (m) => count(m.tokens_per_s), sort: (m) => m.tokens_per_s },
  { name: "Sent", align: "right", value: (m) => bytes(m.sent_bytes), sort: (m) => m.sent_bytes },
  { name: "Received", align: "right", value: (m) => bytes(m.received_bytes), sort: (m) => m.received_bytes },
  { name: "Launches", align: "right", value: (m) => m.attempt, sort: (m) => m.attempt },
  { name: "Last seen", value: (m) => (m.state === "running" ? age(m.last_seen_s) : "–") },
  { name: "Problem", align: "text", value: (m) => m.error?.what ?? "" },
];
