// The page: current view, stream of ticks, and top bar.

import { AddMachine } from "./views/add_machine.js";
import { CompareView } from "./views/compare.js";
import { setText, setPill } from "./lib/dom.js";
import { show } from "./lib/dialog.js";
import { EventsView } from "./views/events.js";
import { FleetView } from "./views/fleet.js";
import { bytes, duration } from "./lib/format.js";
import { Stream } from "./lib/client.js";
import { JobView } from "./job/job.js";
import { JobsView } from "./views/jobs.js";
import { setUpKeys, showKeys } from "./lib/keys.js";
import { PlanView } from "./views/plan.js";
import { QueuesView } from "./views/queues.js";
import { Store } from "./lib/store.js";
import { setUpTheme } from "./lib/theme.js";

const VIEWS = {
  fleet: FleetView, jobs: JobsView, plan: PlanView, compare: CompareView, queues: QueuesView,
  events: EventsView,
};

const DOWN_MS = 3000;
const $ = (id) => document.getElementById(id);
const store = new Store();
let view = null;
let shown = "";
let fed = null; // the view that the stream's details are for; not the next one, which is being fetched
let adding = null; // the dialog about another machine, while it is open

// ----------------------------------------------------------------------------------- views

function route() {
  const [place, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const [name, ...rest] = place.split("/");
  const parts = rest.map((part) => { try { return decodeURIComponent(part); } catch { return part; } });
  return { name: VIEWS[name] ? name : "fleet", parts: parts.filter(Boolean), query: new URLSearchParams(query) };
}

async function go() {
  const wanted = route();
  const kind = wanted.name === "jobs" && wanted.parts.length ? JobView : VIEWS[wanted.name];
  if (!(view instanceof kind && view.go?.(wanted))) {
    view?.close();
    view = new kind(store, wanted);
    $("main").replaceChildren(view.element);
    window.scrollTo(0, 0);
    name(wanted, view);
    await follow(view);
    if (!view.element.isConnected) return; // another one was chosen meanwhile
  } else name(wanted, view);
  if (store.time) view.update();
}

// In the bar and in the title of the window.
function name(wanted, { title }) {
  for (const tab of $("views").children) {
    if (tab.dataset.view === wanted.name) tab.setAttribute("aria-current", "page");
    else tab.removeAttribute("aria-current");
  }
  document.title = `${title} · Atoll`;
}

// The stream carries details of one job; showing another job needs another stream.
async function follow(opened) {
  const job = opened.job ?? "";
  if (stream.source && job === shown) { fed = opened; return; }
  shown = job;
  fed = null;
  if (job) await opened.begin();
  if (view !== opened) return;
  fed = opened;
  stream.open(job, () => ({ since: store.number, ...(job ? { points: opened.data.last.points } : {}) }));
}

// ---------------------------------------------------------------------------------- stream

const stream = new Stream({
  onState: (state) => {
    setPill($("connection"), state);
    showDown(state === "reconnecting");
  },
  onTick: (tick) => {
    store.apply(tick);
    if (view === fed) view?.tick?.(tick);
    if (document.hidden) return;
    showBar();
    view?.update();
    adding?.update();
  },
});

// After a while without an answer the page says so, over figures that are no longer true.
let downTimer = null;
function showDown(down) {
  if (!down) {
    clearTimeout(downTimer);
    downTimer = null;
    $("down").hidden = true;
    return;
  }
  downTimer ??= setTimeout(() => {
    setText($("down-since"), store.time ? `What is below is of ${new Date(store.time * 1000).toLocaleTimeString("en-GB")}.` : "");
    $("down").hidden = false;
  }, DOWN_MS);
}

function showBar() {
  const { hub, alarms } = store;
  setText($("hub-facts"), `${hub.version} · up ${duration(Math.floor(hub.uptime_s / 60) * 60 || hub.uptime_s)} · ${bytes(Math.round(hub.rss_bytes / 1e6) * 1e6)}`);
  $("ticket").hidden = !hub.ticket;
  setText($("role"), hub.role);
  $("role").hidden = !hub.role || hub.role === "operator";
  const badge = $("alarm-count");
  setText(badge, alarms.length || "");
  badge.hidden = !alarms.length;
  badge.className = alarms.some(({ severity }) => severity === "critical") ? "badge bad" : "badge warn";
  badge.title = alarms.length === 1 ? "1 open alarm" : `${alarms.length} open alarms`;
}

// --------------------------------------------------------------------------------- top bar

$("ticket").addEventListener("click", () => {
  adding?.close();
  adding = new AddMachine(store);
  adding.update();
  show("Add a machine", adding.element).addEventListener("close", () => {
    adding?.close();
    adding = null;
  }, { once: true });
});
$("keys").addEventListener("click", showKeys);
$("skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address names the view, so the default jump would change it
  $("main").focus();
});
setUpTheme($("theme"));
setUpKeys();

window.addEventListener("hashchange", go);
if (!location.hash) history.replaceState(null, "", "#/fleet");
go();
