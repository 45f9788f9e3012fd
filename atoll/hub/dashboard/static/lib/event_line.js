// One event as a list item.

import { element, link } from "./dom.js";
import { moment } from "./format.js";

export function isBad(kind) {
  return /lost|fail|abort|refus|damaged|full|error|killed/.test(kind);
}

export function isGood(kind) {
  return /^(done|checkpoint|member-back|resumed|node-online|alarm-ended)$/.test(kind);
}

export function eventLine({ time, kind, text, job }, { named = false } = {}) {
  return element("li", null,
    element("time", { datetime: new Date(time * 1000).toISOString() }, moment(time)),
    element("span", { class: "kind" }, kind),
    element("span", { class: isBad(kind) ? "bad" : isGood(kind) ? "good" : null },
      named && job ? [link(`#/jobs/${encodeURIComponent(job)}`, job), " "] : null, text));
}
