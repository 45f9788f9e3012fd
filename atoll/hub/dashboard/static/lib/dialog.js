// Confirmations before an action, and messages about its outcome.

import { element } from "./dom.js";

const dialog = () => document.getElementById("dialog");
const toasts = () => document.getElementById("toasts");

// Asks; resolves to the values of the fields, or to null if cancelled.
// fields: [{name, label, type, value, min, max}]
export function ask({ title, text, verb, danger = false, fields = [] }) {
  const inputs = fields.map((field) => element("label", { class: "field" }, field.label,
    element("input", {
      name: field.name, type: field.type ?? "text", value: field.value, min: field.min,
      max: field.max, maxlength: 200, required: field.type === "number",
    })));
  const form = element("form", { method: "dialog" },
    element("h2", { id: "dialog-title" }, title),
    element("p", { id: "dialog-text" }, text), ...inputs,
    element("div", { class: "actions" },
      element("button", { value: "", formnovalidate: "" }, "Cancel"),
      element("button", { value: "yes", class: danger ? "danger" : "main" }, verb)));
  const box = dialog();
  box.replaceChildren(form);
  box.returnValue = "";
  const asker = document.activeElement;
  box.showModal();
  (inputs[0]?.querySelector("input") ?? form.querySelector("[value=yes]")).focus();
  return new Promise((resolve) => {
    box.addEventListener("close", () => {
      asker?.focus?.();
      resolve(box.returnValue === "yes" ? Object.fromEntries(new FormData(form)) : null);
    }, { once: true });
  });
}

// Shows content until it is closed.
export function show(title, ...children) {
  const box = dialog();
  box.replaceChildren(element("form", { method: "dialog" },
    element("h2", { id: "dialog-title" }, title), ...children,
    element("div", { class: "actions" }, element("button", { class: "main" }, "Close"))));
  box.showModal();
  return box;
}

export function say(text, tone = "") {
  const toast = element("p", { class: `toast ${tone}` }, text);
  toasts().append(toast);
  while (toasts().children.length > 3) toasts().firstChild.remove();
  setTimeout(() => toast.remove(), tone === "bad" ? 12000 : 5000);
}
