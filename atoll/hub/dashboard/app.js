// The dashboard: one stream of ticks from the hub, written into the page.

import { Chart, Curves, loadPlotly } from "./charts.js";
import {
  age, bytes, clock, count, duration, element, fillTable, jobState, loss, memberState, pill, rate,
  setPill, setText,
} from "./format.js";

const MAX_LINES = 1000;
const MAX_ROWS = 300;
const SILENT_S = 6;

const $ = (id) => document.getElementById(id);

const state = {
  job: decodeURIComponent(location.hash.slice(1)), // "" follows the newest job
  shown: null, // the job whose data is on the page
  source: null,
  lastTick: 0,
  previous: new Map(), // key -> {time, sent, received}, for rates
  rates: new Map(),
  ticket: "",
};
let data = emptyData();

function emptyData() {
  return { curves: new Curves(), rounds: [], lines: [], seen: { points: 0, rounds: 0, events: 0, lines: 0 } };
}

const charts = {
  loss: new Chart($("loss-chart"), ["loss", "held_out"]),
  speed: new Chart($("speed-chart"), ["tokens_per_s"], { zero: true }),
};

loadPlotly().then((there) => {
  $("no-plotly").hidden = there;
  $("charts").hidden = !there;
  drawCharts();
});

function drawCharts() {
  charts.loss.draw(data.curves);
  charts.speed.draw(data.curves);
}

// ------------------------------------------------------------------------------ stream

function connect(job) {
  state.source?.close();
  if (job !== state.shown) {
    data = emptyData();
    state.shown = job;
    $("events").replaceChildren();
    $("log").replaceChildren();
    $("log-member").replaceChildren(element("option", { value: "" }, "all members"));
    drawCharts();
  }
  const source = new EventSource(`/api/stream?job=${encodeURIComponent(job)}`);
  source.onmessage = (message) => {
    if (source === state.source) onTick(JSON.parse(message.data));
  };
  source.onerror = () => setPill($("connection"), "reconnecting");
  state.source = source;
}

function fresh(items, name) {
  const news = (items ?? []).filter((item) => item.id > data.seen[name]);
  if (news.length) data.seen[name] = news.at(-1).id;
  return news;
}

function onTick(tick) {
  state.lastTick = performance.now();
  setPill($("connection"), "live");
  state.ticket = tick.hub.ticket;
  $("ticket").hidden = !state.ticket;
  setText($("hub-facts"),
    `version ${tick.hub.version} · up ${duration(tick.hub.uptime_s)} · ${bytes(tick.hub.rss_bytes)} memory`);
  measureRates(tick);
  showNodes(tick.nodes);
  showJobs(tick.jobs);
  const wanted = tick.jobs.some((job) => job.job === state.job) ? state.job : tick.jobs[0]?.job ?? "";
  if (wanted !== state.shown) { connect(wanted); return; }
  if (tick.job) showJob(tick);
  else $("job-panel").hidden = true;
}

// Rates over about three seconds, from the cumulative counters.
function measureRates({ time, nodes, job }) {
  const measured = nodes.map((node) => [`node/${node.node}`, node]);
  if (job) measured.push([`job/${job.job}`, job]);
  for (const [key, { sent_bytes: sent, received_bytes: received }] of measured) {
    const before = state.previous.get(key);
    if (before && time - before.time < 3) continue;
    if (before && sent >= before.sent && received >= before.received) {
      const seconds = time - before.time;
      state.rates.set(key, {
        up: (sent - before.sent) / seconds, down: (received - before.received) / seconds,
      });
    }
    state.previous.set(key, { time, sent, received });
  }
}

// ------------------------------------------------------------------------ nodes and jobs

const upDown = (key) => {
  const measured = state.rates.get(key);
  return measured ? `${rate(measured.up)} / ${rate(measured.down)}` : "–";
};

const NODE_COLUMNS = [
  ["Node", "", (node) => node.node],
  ["State", "", (node) => pill(node.draining && node.state === "online" ? "draining" : node.state)],
  ["Heard", "", (node) => age(node.last_seen_s)],
  ["Tokens/s", "right", (node) => (node.tokens_per_s ? count(node.tokens_per_s) : "–")],
  ["Sent", "right", (node) => bytes(node.sent_bytes)],
  ["Received", "right", (node) => bytes(node.received_bytes)],
  ["Up / down", "right", (node) => upDown(`node/${node.node}`)],
  ["Load", "right", (node) => (node.stats.cpu_percent == null ? "–" : `${Math.round(node.stats.cpu_percent)} %`)],
  ["Cores", "right", (node) => node.info.cores || "–"],
  ["Memory", "right", (node) => (node.info.memory_bytes ? bytes(node.info.memory_bytes) : "–")],
  ["Runs", "", (node) => node.running.map((name) => name.split("/").at(-1)).join(", ") || "nothing"],
];

function showNodes(nodes) {
  const online = nodes.filter((node) => node.state === "online").length;
  setText($("nodes-count"), nodes.length ? `${online} of ${nodes.length} online` : "");
  $("no-nodes").hidden = nodes.length > 0;
  $("nodes").hidden = nodes.length === 0;
  fillTable($("nodes"), NODE_COLUMNS, nodes, (node) => (node.state === "online" ? "" : "lost"));
}

function showJobs(jobs) {
  $("no-jobs").hidden = jobs.length > 0;
  const list = $("jobs");
  const known = new Map([...list.children].map((item) => [item.dataset.job, item]));
  jobs.forEach((job, at) => {
    const item = known.get(job.job) ?? jobItem(job.job);
    known.delete(job.job);
    if (list.children[at] !== item) list.insertBefore(item, list.children[at] ?? null);
    const button = item.firstChild;
    const current = String(job.job === state.shown);
    if (button.getAttribute("aria-current") !== current) button.setAttribute("aria-current", current);
    const shownState = jobState(job);
    setPill(item.querySelector(".pill"), shownState);
    const percent = `${Math.round(job.progress.fraction * 100)} %`;
    setText(item.querySelector(".quiet"), `${percent}${job.loss == null ? "" : ` · loss ${loss(job.loss)}`}`);
  });
  for (const gone of known.values()) gone.remove();
}

function jobItem(name) {
  const button = element("button", { type: "button" },
    element("span", { class: "name" }, name),
    element("span", { class: "facts" }, element("span", { class: "pill" }), element("span", { class: "quiet" })));
  button.addEventListener("click", () => select(name));
  const item = element("li", null, button);
  item.dataset.job = name;
  return item;
}

function select(job) {
  state.job = job;
  history.replaceState(null, "", `#${encodeURIComponent(job)}`);
  for (const item of $("jobs").children) {
    item.firstChild.setAttribute("aria-current", String(item.dataset.job === job));
  }
  if (job !== state.shown) connect(job);
}

$("jobs").addEventListener("keydown", (event) => {
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  const buttons = [...$("jobs").querySelectorAll("button")];
  const target = buttons[buttons.indexOf(document.activeElement) + step];
  if (!step || !target) return;
  event.preventDefault();
  target.focus();
});

// -------------------------------------------------------------------------- selected job

const MEMBER_COLUMNS = [
  ["Member", "", (m) => m.member],
  ["Node", "", (m) => m.node],
  ["State", "", (m) => pill(memberState(m))],
  ["Step", "right", (m) => count(m.step)],
  ["Pace", "right", (m) => (m.pace ? `${Math.round(100 * m.pace)} %` : "–")],
  ["Round", "right", (m) => m.round],
  ["Loss", "right", (m) => loss(m.loss)],
  ["Tokens/s", "right", (m) => count(m.tokens_per_s)],
  ["Sent", "right", (m) => bytes(m.sent_bytes)],
  ["Received", "right", (m) => bytes(m.received_bytes)],
  ["Heard", "", (m) => (m.state === "running" ? age(m.last_seen_s) : "–")],
  ["Problem", "text", (m) => m.error?.what ?? ""],
];

const ROUND_COLUMNS = [
  ["Round", "right", (r) => r.round],
  ["Epoch", "right", (r) => r.epoch],
  ["Verdict", "", (r) => pill(r.committed ? "committed" : "aborted")],
  ["Members", "text", (r) => (r.committed ? members(r) : r.reason)],
  ["Route", "", (r) => r.route],
  ["Time", "right", (r) => duration(r.seconds)],
  ["Bytes", "right", (r) => bytes(r.nbytes)],
];

function members({ members: planned, contributors }) {
  if (contributors.length === planned.length) return planned.join(" ");
  return `${contributors.join(" ")} (${contributors.length} of ${planned.length})`;
}

function showJob(tick) {
  const { job } = tick;
  $("job-panel").hidden = false;
  document.title = `${job.job} · Atoll`;
  setText($("job-title"), job.job);
  setPill($("job-state"), jobState(job));
  setText($("job-reason"), problem(job));
  $("job-reason").className = job.state === "failed" ? "reason bad" : "reason";
  $("stop").hidden = !["running", "waiting"].includes(job.state) || job.stopping;
  $("resume").hidden = !["failed", "stopped"].includes(job.state);
  showProgress(job, tick.time);
  showTiles(job);
  fillTable($("members"), MEMBER_COLUMNS, job.members, (m) => (m.state === "lost" ? "lost" : ""));
  setText($("spec"), job.spec);
  const points = fresh(tick.points, "points");
  data.curves.add(points);
  if (points.length) drawCharts();
  showRounds(fresh(tick.rounds, "rounds"), job);
  showEvents(fresh(tick.events, "events"));
  showLines(fresh(tick.lines, "lines"));
}

function problem({ reason, error }) {
  return [reason, error?.what, error?.given, error?.remedy]
    .filter((part, at, all) => part && all.indexOf(part) === at).join(" · ");
}

function showProgress({ progress, started, ended, state: name }, now) {
  $("progress").value = progress.fraction;
  const parts = [`step ${count(progress.step)} of ${count(progress.steps)}`];
  if (started) parts.push(`${duration((ended ?? now) - started)} so far`);
  if (name === "running" && progress.fraction > 0.02 && started) {
    const left = ((now - started) / progress.fraction) * (1 - progress.fraction);
    parts.push(`about ${duration(left)} left`);
  }
  setText($("progress-text"), (ended ? parts.join(" · ").replace(" so far", "") : parts.join(" · ")));
}

function showTiles(job) {
  const tiles = [
    ["Round", count(job.committed_round), job.aborted_rounds ? `${job.aborted_rounds} aborted` : ""],
    ["Train loss", loss(job.loss), ""],
    ["Held-out loss", loss(job.held_out_loss), ""],
    ["Tokens/s", job.state === "running" ? count(job.tokens_per_s) : "–", ""],
    ["Sent", bytes(job.sent_bytes), ""],
    ["Received", bytes(job.received_bytes), ""],
  ];
  const list = $("tiles");
  tiles.forEach(([name, value, note], at) => {
    const tile = list.children[at]
      ?? list.appendChild(element("div", null, element("dt", null, name), element("dd")));
    const shown = note ? `${value} ${note}` : value;
    if (tile.lastChild.textContent !== shown) {
      tile.lastChild.replaceChildren(value, ...(note ? [" ", element("small", null, note)] : []));
    }
  });
}

function showRounds(news, { committed_round: committed, aborted_rounds: aborted }) {
  setText($("rounds-count"), `${committed} committed, ${aborted} aborted`);
  if (!news.length && $("rounds").tHead) return;
  data.rounds = [...news.reverse(), ...data.rounds].slice(0, MAX_ROWS);
  fillTable($("rounds"), ROUND_COLUMNS, data.rounds);
}

function showEvents(news) {
  const list = $("events");
  for (const event of news) {
    const bad = /lost|fail|abort|refus|damaged|full/.test(event.kind);
    const good = /^(done|checkpoint|member-back|resumed)/.test(event.kind);
    list.prepend(element("li", { title: event.kind },
      element("time", { datetime: new Date(event.time * 1000).toISOString() }, clock(event.time)),
      element("span", { class: bad ? "bad" : good ? "good" : null }, event.text)));
  }
  while (list.children.length > MAX_ROWS) list.lastChild.remove();
}

function showLines(news) {
  if (!news.length) return;
  data.lines = [...data.lines, ...news].slice(-MAX_LINES);
  for (const { member } of news) {
    const choices = [...$("log-member").options].map((option) => option.value);
    if (!choices.includes(member)) $("log-member").append(element("option", { value: member }, member));
  }
  writeLines(news, false);
}

function writeLines(lines, afresh) {
  const log = $("log");
  const atEnd = afresh || log.scrollHeight - log.scrollTop - log.clientHeight < 30;
  const wanted = $("log-member").value;
  const written = lines.filter(({ member }) => !wanted || member === wanted).map(({ member, text }) => {
    const name = element("b", null, member);
    const slot = Number.parseInt(member.slice(1), 10);
    if (!Number.isNaN(slot)) name.style.color = `var(--series-${slot % 8})`;
    return element("div", null, name, text);
  });
  if (afresh) log.replaceChildren(...written);
  else log.append(...written);
  while (log.children.length > MAX_LINES) log.firstChild.remove();
  if (atEnd) log.scrollTop = log.scrollHeight;
}

$("log-member").addEventListener("change", () => writeLines(data.lines, true));

// -------------------------------------------------------------------------------- verbs

async function tell(verb) {
  const answer = await fetch(`/api/jobs/${encodeURIComponent(state.shown)}/${verb}`, {
    method: "POST", headers: { "content-type": "application/json" }, body: "{}",
  });
  if (!answer.ok) {
    const { error } = await answer.json();
    window.alert(`${error.what}${error.remedy ? `: ${error.remedy}` : ""}`);
  }
}

$("stop").addEventListener("click", () => {
  if (window.confirm(`Stop ${state.shown} after its round? It saves a checkpoint.`)) tell("stop");
});
$("resume").addEventListener("click", () => tell("resume"));
$("ticket").addEventListener("click", async () => {
  const command = `atoll join ${state.ticket}`;
  try {
    await navigator.clipboard.writeText(command);
    setText($("ticket"), "Copied");
    setTimeout(() => setText($("ticket"), "Copy join command"), 1500);
  } catch {
    window.prompt("Run this on the machine that joins:", command);
  }
});

setInterval(() => {
  if (performance.now() - state.lastTick > SILENT_S * 1000) setPill($("connection"), "reconnecting");
  if (state.source?.readyState === EventSource.CLOSED) connect(state.shown ?? state.job);
}, 2000);

window.addEventListener("hashchange", () => select(decodeURIComponent(location.hash.slice(1))));
connect(state.job);
