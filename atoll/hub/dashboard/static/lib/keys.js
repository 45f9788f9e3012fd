// Global keyboard shortcuts; lists, map and timeline have their own.

import { element } from "./dom.js";
import { show } from "./dialog.js";

const GO = { f: "#/fleet", j: "#/jobs", p: "#/plan", c: "#/compare", q: "#/queues", e: "#/events" };
const HELP = [
  ["g f  g j  g p  g c  g q  g e", "go to the cluster, jobs, plan, compare, queues, activity"],
  ["/", "search in this view"],
  ["↑ ↓ Home End", "move through a list, or around the map"],
  ["← →", "move through the parts of a job, or the rounds of the timeline"],
  ["+ −", "zoom the timeline"],
  ["Enter", "open"],
  ["Esc", "close a dialog, leave a field"],
  ["?", "these keys"],
];

export function showKeys() {
  show("Keys", element("dl", { class: "keys" }, ...HELP.map(([keys, text]) => element("div", null,
    element("dt", null, ...keys.split("  ").map((key) => element("kbd", null, key))),
    element("dd", null, text)))));
}

export function setUpKeys() {
  let first = "";
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    if (document.getElementById("dialog").open) return;
    const field = event.target.matches("input, select, textarea");
    if (event.key === "Escape" && field) event.target.blur();
    if (field) return;
    if (walkLinks(event)) return;
    const before = first;
    first = event.key === "g" ? "g" : "";
    if (before === "g" && GO[event.key]) location.hash = GO[event.key];
    else if (event.key === "?") showKeys();
    else if (event.key === "/") {
      event.preventDefault();
      document.querySelector("[data-search]")?.focus();
    }
  });
}

// Left and right move along a row of tabs.
function walkLinks(event) {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  const row = event.target.closest("nav");
  if (!step || !row) return false;
  const links = [...row.querySelectorAll("a:not([hidden])")];
  const next = links[(links.indexOf(event.target) + step + links.length) % links.length];
  event.preventDefault();
  next?.focus();
  return true;
}
