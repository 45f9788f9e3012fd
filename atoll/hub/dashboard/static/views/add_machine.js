// What to type on another machine: per system, with the pairing code, and who has arrived.

import { path } from "../lib/client.js";
import { button, element, fill, pill, setText } from "../lib/dom.js";
import { duration } from "../lib/format.js";

const ASK_MS = 4000;
const COPIED_MS = 2000;
const WIDE_OPEN = "~"; // tickets of a hub with TLS end with a mark

const SYSTEMS = {
  linux: { name: "Linux", python: "python3 -m pip", join: "atoll join" },
  macos: { name: "macOS", python: "python3 -m pip", join: "atoll join" },
  windows: { name: "Windows", python: "py -m pip", join: "py -m atoll.cli join" },
};

// The browser's own system: the next machine is often of the same kind.
function systemHere() {
  const platform = `${navigator.userAgentData?.platform ?? ""} ${navigator.platform} ${navigator.userAgent}`.toLowerCase();
  if (/win/.test(platform) && !/darwin/.test(platform)) return "windows";
  return /mac|iphone|ipad/.test(platform) ? "macos" : "linux";
}

// A line to copy.
function command(text) {
  const copy = button("Copy", async () => {
    try {
      await navigator.clipboard.writeText(text);
      copy.textContent = "Copied";
    } catch { // without permission: select it, to be copied by hand
      getSelection().selectAllChildren(code);
      copy.textContent = "Selected";
    }
    setTimeout(() => { copy.textContent = "Copy"; }, COPIED_MS);
  }, { "aria-label": `Copy ${text.slice(0, 60)}` });
  const code = element("code", null, text);
  return element("div", { class: "command" }, code, copy);
}

export class AddMachine {
  constructor(store) {
    this.store = store;
    this.known = null;
    this.system = systemHere();
    this.shown = null; // what the hub last said of the code
    this.until = 0;
    this.tabs = element("div", { class: "tabs", role: "tablist", "aria-label": "System of the other machine" },
      ...Object.entries(SYSTEMS).map(([key, { name }]) => button(name, () => this.#choose(key), {
        role: "tab", "data-system": key,
        keydown: (event) => this.#move(event, key),
      })));
    this.digits = element("strong", { class: "code" });
    this.left = element("span", { class: "quiet" });
    this.pairing = element("div", { class: "pairing", role: "status" });
    this.steps = element("ol", { class: "steps" });
    this.arrived = element("p", { class: "arrived", role: "status" });
    this.local = element("p", { class: "note", hidden: "" });
    const panel = element("div", { role: "tabpanel", "aria-label": "What to type there" }, this.steps);
    this.element = element("div", { class: "add-machine" }, this.local, this.tabs, panel);
    this.timer = setInterval(() => this.#ask(), ASK_MS);
    this.clock = setInterval(() => this.#showLeft(), 1000);
    this.#choose(this.system);
    this.#ask();
  }

  update() {
    const online = this.store.nodeList().filter(({ state }) => state === "online").map(({ node }) => node);
    const before = this.known;
    this.known = new Set([...(before ?? []), ...online]);
    const fresh = before ? online.filter((node) => !before.has(node)) : [];
    if (fresh.length) {
      this.here = [...(this.here ?? []), ...fresh];
      this.#ask();
    }
    const which = online.length ? "the next laptop" : "the first laptop";
    this.arrived.classList.toggle("lit", Boolean(this.here));
    fill(this.arrived, ...(this.here ? [pill("online"), " ", element("strong", null, this.here.join(", ")), " is here."] : [`waiting for ${which} …`]));
    if (this.ticket !== this.store.hub.ticket) this.#choose(this.system);
  }

  close() {
    clearInterval(this.timer);
    clearInterval(this.clock);
  }

  #choose(key) {
    this.system = key;
    for (const tab of this.tabs.children) {
      const chosen = tab.dataset.system === key;
      tab.setAttribute("aria-selected", String(chosen));
      tab.tabIndex = chosen ? 0 : -1;
    }
    const { python, join } = SYSTEMS[key];
    const { ticket = "", package: wanted = "atoll", join_line: line = "" } = this.store.hub;
    this.ticket = this.store.hub.ticket;
    const secure = ticket.includes(WIDE_OPEN);
    const local = /\/\/(127\.|localhost|\[?::1)/.test(ticket);
    this.local.hidden = !local;
    setText(this.local, local ? "This hub listens on 127.0.0.1, so other machines cannot reach it. Restart it so that they can: atoll hub --host 0.0.0.0" : "");
    this.steps.replaceChildren(
      element("li", null, element("h3", null, "1. Install Atoll there, once"), command(`${python} install "${wanted}"`)),
      element("li", null, element("h3", null, secure ? "2. In this network: type this, and the code" : "2. Join with the ticket"),
        command(secure ? join : `${join} ${ticket}`), secure ? this.pairing : null),
      element("li", null, element("h3", null, "3. It appears here"), this.arrived),
      ...(line ? [element("li", null, element("h3", null, "Or from anywhere, without installing: paste this line"),
        command(line), element("p", { class: "quiet" }, "It needs uv (docs.astral.sh/uv), and this hub's address to be reachable from there."))] : []),
    );
  }

  #move(event, key) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const keys = Object.keys(SYSTEMS);
    const next = keys[(keys.indexOf(key) + step + keys.length) % keys.length];
    this.#choose(next);
    this.tabs.querySelector(`[data-system=${next}]`).focus();
    event.preventDefault();
    event.stopPropagation();
  }

  async #ask(options) {
    if (document.hidden || !(this.store.hub.ticket ?? "").includes(WIDE_OPEN)) return;
    try {
      const answer = await fetch(path("pairing"), options);
      if (answer.ok) this.#show(await answer.json());
    } catch { /* asked again */ }
  }

  #show(status) {
    const same = this.shown?.code === status.code && this.shown?.tries_left === status.tries_left;
    this.shown = status;
    this.until = performance.now() + status.left_s * 1000;
    if (same) return;
    setText(this.digits, status.code);
    if (status.code) {
      const tries = status.tries_left < 3 ? `${3 - status.tries_left} wrong so far` : null;
      this.pairing.replaceChildren(this.digits, this.left, tries ? element("span", { class: "bad" }, tries) : "");
    } else {
      this.pairing.replaceChildren(
        element("p", { class: "note" }, "Three wrong codes came, so pairing has stopped. The events say from which address."),
        button("New code", () => this.#ask({
          method: "POST", headers: { "content-type": "application/json" }, body: "{}",
        }), { class: "main" }));
    }
    this.#showLeft();
  }

  #showLeft() {
    const seconds = Math.max(0, Math.round((this.until - performance.now()) / 1000));
    setText(this.left, `for one machine, ${duration(seconds)} left`);
  }
}
