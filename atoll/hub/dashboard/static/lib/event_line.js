// One event as a list item: who and what, machines by the names that people gave them.

import { element, link } from "./dom.js";
import { moment } from "./format.js";
import { machineOf, nameOf } from "./store.js";

const MEMBER = /\bw\d+\b/g;

export function isBad(kind) {
  return /lost|fail|abort|refus|damaged|full|error|killed/.test(kind);
}

export function isGood(kind) {
  return /^(done|checkpoint|member-back|resumed|node-online|alarm-ended)$/.test(kind);
}

// A sentence with w2 written as lap3, or lap3 (w2) where that machine has several members; w2
// stays where the machine is not known, or is named beside it.
export function spoken(text, view) {
  return text.replace(MEMBER, (member) => (text.includes(machineOf(view, member)) ? member : nameOf(view, member)));
}

// view: of the job that the event belongs to, for its machines.
export function eventLine({ time, kind, text, job, member }, { named = false, view = null } = {}) {
  return element("li", null,
    element("time", { datetime: new Date(time * 1000).toISOString() }, moment(time)),
    element("span", { class: "kind" }, kind.replaceAll("-", " ")),
    element("span", { class: isBad(kind) ? "bad" : isGood(kind) ? "good" : null },
      named && job ? [link(`#/jobs/${encodeURIComponent(job)}`, job), " "] : null,
      withMachine(spoken(named && job && text.startsWith(`${job} `) ? text.slice(job.length + 1) : text, view), member, view)));
}

// Whose event it is, where the sentence does not say so.
function withMachine(sentence, member, view) {
  const name = member && view ? nameOf(view, member) : "";
  return name && name !== member && !sentence.includes(machineOf(view, member)) ? `${name}: ${sentence}` : sentence;
}
