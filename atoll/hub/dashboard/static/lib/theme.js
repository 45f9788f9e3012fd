// Light or dark theme: the system's, or as chosen here.

import { setText } from "./dom.js";

const NAMES = { "": "system default", light: "light", dark: "dark" };
const NEXT = { "": "light", light: "dark", dark: "" };

export function setUpTheme(switcher) {
  let chosen = "";
  try {
    chosen = localStorage.getItem("atoll-theme") ?? "";
  } catch { /* without storage the choice is not kept */ }
  const apply = () => {
    document.documentElement.dataset.theme = chosen;
    setText(switcher, { "": "◐", light: "☀", dark: "☾" }[chosen]);
    switcher.setAttribute("aria-label", `Colours: ${NAMES[chosen]}. Change`);
    switcher.title = `Colours: ${NAMES[chosen]}`;
    document.dispatchEvent(new Event("themechange"));
  };
  switcher.addEventListener("click", () => {
    chosen = NEXT[chosen];
    try { localStorage.setItem("atoll-theme", chosen); } catch { /* as above */ }
    apply();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", apply);
  apply();
}
