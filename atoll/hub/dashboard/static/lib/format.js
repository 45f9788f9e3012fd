// Formats numbers and times.

export const NONE = "–";

export function bytes(n) {
  if (n == null) return NONE;
  const units = ["B", "kB", "MB", "GB", "TB"];
  let i = 0;
  while (n >= 1000 && i < units.length - 1) { n /= 1000; i += 1; }
  return `${i && n < 100 ? n.toFixed(1) : Math.round(n)} ${units[i]}`;
}

export function rate(bytesPerSecond) {
  return bytesPerSecond == null ? NONE : `${bytes(bytesPerSecond)}/s`;
}

// Bits per second with decimal prefixes, as usual for links.
export function bits(bps) {
  if (!bps) return NONE;
  const units = ["bit/s", "kbit/s", "Mbit/s", "Gbit/s"];
  let i = 0;
  while (bps >= 1000 && i < units.length - 1) { bps /= 1000; i += 1; }
  return `${bps < 10 ? bps.toFixed(1) : Math.round(bps)} ${units[i]}`;
}

export function count(n) {
  if (n == null || !Number.isFinite(n)) return NONE;
  if (n < 0) return `−${count(-n)}`;
  if (n >= 1e9) return `${(n / 1e9).toFixed(2)}G`;
  if (n >= 1e6) return `${(n / 1e6).toFixed(2)}M`;
  if (n >= 1e4) return `${(n / 1e3).toFixed(1)}k`;
  if (n > 0 && n < 10 && !Number.isInteger(n)) return n.toFixed(1);
  return Math.round(n).toLocaleString("en");
}

// A number with its significant digits only.
export function short(n) {
  if (n == null || !Number.isFinite(n)) return NONE;
  const size = Math.abs(n);
  if (size >= 1e4) return count(n);
  if (size === 0 || size >= 1e-3) return String(Number(n.toPrecision(4)));
  return n.toExponential(1);
}

export function loss(value) {
  return value == null ? NONE : value.toFixed(3);
}

export function percent(value, digits = 0) {
  return value == null ? NONE : `${value.toFixed(digits)} %`;
}

export function milliseconds(ms) {
  if (ms == null) return NONE;
  return ms < 10 ? `${ms.toFixed(1)} ms` : `${Math.round(ms)} ms`;
}

export function duration(s) {
  if (s == null || !Number.isFinite(s)) return NONE;
  if (s < 0.1 && s > 0) return `${Math.round(s * 1000)} ms`;
  if (s < 60) return `${s < 10 ? s.toFixed(1) : Math.round(s)} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${Math.floor(s % 60)} s`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

export function age(s) {
  if (s == null) return "never";
  return s < 6 ? "now" : `${duration(s)} ago`;
}

export function clock(seconds) {
  return new Date(seconds * 1000).toLocaleTimeString("en-GB");
}

// The time, preceded by the day unless it is today.
export function moment(seconds) {
  if (!seconds) return NONE;
  const then = new Date(seconds * 1000);
  const time = then.toLocaleTimeString("en-GB");
  if (then.toDateString() === new Date().toDateString()) return time;
  return `${then.toLocaleDateString("en-GB", { day: "numeric", month: "short" })} ${time}`;
}

export function plural(n, one, many = `${one}s`) {
  return `${n} ${n === 1 ? one : many}`;
}

// Ascending numbers as ranges, e.g. ["0-3", "8"].
export function ranges(numbers) {
  const runs = [];
  for (const number of numbers) {
    const last = runs.at(-1);
    if (last && number === last[1] + 1) last[1] = number;
    else runs.push([number, number]);
  }
  return runs.map(([first, last]) => (first === last ? `${first}` : `${first}-${last}`));
}

// The first of many words, and how many more there are.
export function few(words, most = 6) {
  const rest = words.length - most;
  return rest > 1 ? `${words.slice(0, most).join(", ")} and ${rest} more` : words.join(", ");
}
