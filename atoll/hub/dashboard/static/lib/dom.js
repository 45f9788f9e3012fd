// DOM elements: create, update, and colour by state. Text is never parsed as HTML.

// element("td", {class: "right"}, "text", child, ...); null attributes and children are skipped.
export function element(tag, attributes, ...children) {
  const made = document.createElement(tag);
  set(made, attributes);
  made.append(...usable(children));
  return made;
}

// The same for SVG.
export function drawn(tag, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  set(made, attributes);
  made.append(...usable(children));
  return made;
}

function usable(children) {
  return children.flat().filter((child) => child != null)
    .map((child) => (child instanceof Node ? child : String(child)));
}

// Functions become listeners, everything else attributes.
export function set(target, attributes) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (typeof value === "function") target.addEventListener(name, value);
    else if (value == null || value === false) target.removeAttribute(name);
    else if (target.getAttribute(name) !== String(value)) target.setAttribute(name, value);
  }
  return target;
}

// Writing only changes preserves selections, focus and screen reader state.
export function setText(target, text) {
  const wanted = String(text);
  if (target.textContent !== wanted) target.textContent = wanted;
}

// Replaces children unless their text is equal.
export function fill(target, ...children) {
  const made = element("div", null, ...children);
  if (target.innerHTML !== made.innerHTML) target.replaceChildren(...made.childNodes);
}

const TONES = {
  running: "run", online: "good", ready: "good", done: "good", committed: "good", live: "good", ok: "good",
  keep: "good", operator: "run",
  failed: "bad", lost: "bad", banned: "bad", critical: "bad", remove: "bad", refused: "bad",
  aborted: "warn", waiting: "warn", stopped: "warn", starting: "warn", assigned: "warn",
  stopping: "warn", recovering: "warn", silent: "warn", paused: "warn",
  draining: "warn", warning: "warn", reconnecting: "warn",
};

export function pill(state, tone = TONES[state] ?? "") {
  return element("span", { class: `pill ${tone}` }, state);
}

export function setPill(target, state) {
  const wanted = `pill ${TONES[state] ?? ""}`;
  if (target.className !== wanted) target.className = wanted;
  setText(target, state);
}

// A share as a bar with its number; `value` in percent, null if unknown. Never red: a machine in
// full use is the goal, and what is a fault has an alarm.
export function bar(value, { name = "", text = null } = {}) {
  if (value == null) return element("span", { class: "quiet" }, "–");
  const level = Math.max(0, Math.min(100, value));
  const inside = element("span", { class: "fill" });
  inside.style.width = `${level}%`;
  return element("span", { class: "bar", title: name || null },
    element("span", { class: "track", "aria-hidden": "true" }, inside),
    element("span", { class: "value" }, text ?? `${Math.round(value)} %`));
}

export function link(href, text, attributes) {
  return element("a", { href, ...attributes }, text);
}

export function button(text, listener, attributes) {
  return element("button", { type: "button", click: listener, ...attributes }, text);
}

export function card(title, ...children) {
  const id = `card-${title.toLowerCase().replace(/[^a-z]+/g, "-")}`;
  return element("section", { class: "card", "aria-labelledby": id },
    element("h2", { id }, title), ...children);
}

// Name and value pairs.
export function facts(pairs) {
  return element("dl", { class: "facts" }, ...pairs.filter((pair) => pair)
    .map(([name, value]) => element("div", null,
      element("dt", null, name), element("dd", null, value))));
}

export function empty(text, hint) {
  return element("p", { class: "empty" }, text, hint ? [" ", element("code", null, hint)] : null);
}
