// Numbers, times and elements: how the page writes what the hub says.

export function bytes(n) {
  if (n == null) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let i = 0;
  while (n >= 1000 && i < units.length - 1) { n /= 1000; i += 1; }
  return `${i && n < 100 ? n.toFixed(1) : Math.round(n)} ${units[i]}`;
}

export function rate(bytesPerSecond) {
  return bytesPerSecond == null ? "–" : `${bytes(bytesPerSecond)}/s`;
}

export function count(n) {
  if (n == null) return "–";
  if (n >= 1e6) return `${(n / 1e6).toFixed(2)}M`;
  if (n >= 1e4) return `${(n / 1e3).toFixed(1)}k`;
  return Math.round(n).toLocaleString("en");
}

export function loss(value) {
  return value == null ? "–" : value.toFixed(3);
}

export function duration(s) {
  if (s == null || !Number.isFinite(s)) return "–";
  if (s < 60) return `${s < 10 ? s.toFixed(1) : Math.round(s)} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${Math.round(s % 60)} s`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.round((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.round((s % 86400) / 3600)} h`;
}

export function age(s) {
  if (s == null) return "never";
  return s < 3 ? "now" : `${duration(s)} ago`;
}

export function clock(seconds) {
  return new Date(seconds * 1000).toLocaleTimeString("en-GB");
}

// element("td", {class: "right"}, "text", child, ...): text is never read as HTML.
export function element(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value != null) made.setAttribute(name, value);
  }
  made.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return made;
}

const TONES = {
  running: "run", online: "good", done: "good", committed: "good", live: "good",
  failed: "bad", lost: "bad", aborted: "warn", waiting: "warn", stopped: "warn",
  starting: "warn", assigned: "warn", stopping: "warn", left: "warn",
  recovering: "warn", silent: "warn", paused: "warn", draining: "warn",
};

// What a member does, in one word: rounds know more than its process tells.
export function memberState(member) {
  if (member.state !== "running") return member.state;
  return { recovering: "recovering", away: "silent" }[member.standing] ?? member.state;
}

export function jobState(job) {
  if (job.state !== "running") return job.state;
  if (job.stopping) return "stopping";
  return job.paused ? "paused" : job.state;
}

export function pill(state) {
  return element("span", { class: `pill ${TONES[state] ?? ""}` }, state);
}

export function setPill(target, state) {
  target.className = `pill ${TONES[state] ?? ""}`;
  setText(target, state);
}

// Writing only what changed keeps selections, screen readers and focus at rest.
export function setText(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

// columns: [heading, alignment, row -> string or Node]; rows are objects.
export function fillTable(table, columns, rows, rowClass = () => "") {
  if (!table.tHead) {
    const heads = columns.map(([name, align]) => element("th", { class: align, scope: "col" }, name));
    table.append(element("thead", null, element("tr", null, ...heads)), element("tbody"));
  }
  const body = table.tBodies[0];
  while (body.rows.length > rows.length) body.deleteRow(-1);
  rows.forEach((row, at) => {
    const line = body.rows[at] ?? body.insertRow();
    line.className = rowClass(row);
    columns.forEach(([, align, value], column) => {
      const cell = line.cells[column] ?? line.insertCell();
      cell.className = align;
      const content = value(row);
      if (!(content instanceof Node)) setText(cell, String(content));
      else if (cell.textContent !== content.textContent) cell.replaceChildren(content);
    });
  });
}
