// Arithmetic of charts: ticks, scales, smoothing, means, gaps. Nothing here touches the page.

const SECOND = 1000, MINUTE = 60 * SECOND, HOUR = 60 * MINUTE, DAY = 24 * HOUR;
const TIME_STEPS = [1, 2, 5, 10, 15, 30].map((n) => n * SECOND)
  .concat([1, 2, 5, 10, 15, 30].map((n) => n * MINUTE), [1, 2, 3, 6, 12].map((n) => n * HOUR),
    [1, 2, 7, 14, 30, 90, 365].map((n) => n * DAY));
const GAP_TIMES = 8; // a pause this many times longer than usual is an absence
const GAP_S = 20;
const HELD = 0.03; // of the axis: so long the last value of a curve counts in the mean

// Round values between low and high, about `most` of them.
export function ticks(low, high, most) {
  const rough = (high - low) / Math.max(1, most);
  if (!(rough > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough * 0.999);
  const found = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n += 1) found.push(Number((n * step).toPrecision(12)));
  return found;
}

export function logTicks(low, high, most) {
  const all = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
    for (const n of [1, 2, 5]) all.push(Number((n * 10 ** power).toPrecision(12)));
  }
  const inside = all.filter((value) => value >= low && value <= high);
  if (inside.length < 2) return ticks(low, high, most);
  const whole = inside.filter((value) => Number.isInteger(Math.round(Math.log10(value) * 1e9) / 1e9));
  return inside.length > most && whole.length > 1 ? whole : inside;
}

// Moments at round local times; `low` and `high` in milliseconds.
export function timeTicks(low, high, most) {
  const step = TIME_STEPS.find((n) => (high - low) / n <= most) ?? TIME_STEPS.at(-1);
  const shift = new Date(low).getTimezoneOffset() * MINUTE;
  const found = [];
  for (let at = Math.ceil((low - shift) / step) * step + shift; at <= high; at += step) found.push(at);
  return { found, step };
}

export function timeText(at, step) {
  const then = new Date(at);
  if (step >= DAY) return then.toLocaleDateString("en-GB", { day: "numeric", month: "short" });
  return then.toLocaleTimeString("en-GB", step < MINUTE ? {} : { hour: "2-digit", minute: "2-digit" });
}

// A moving average that forgets; `weight` 0 keeps the values. Not biased towards the first value.
export function smooth(values, weight) {
  if (!weight) return values;
  let sum = 0, share = 0;
  return values.map((value) => {
    if (!Number.isFinite(value)) return value;
    sum = weight * sum + (1 - weight) * value;
    share = weight * share + (1 - weight);
    return sum / share;
  });
}

// Places at which a line is broken: its owner was away for much longer than between other points.
export function gaps(time) {
  if (!time || time.length < 3) return new Set();
  const pauses = time.slice(1).map((at, place) => at - time[place]);
  const usual = [...pauses].sort((a, b) => a - b)[Math.floor(pauses.length / 2)];
  const long = Math.max(GAP_S, GAP_TIMES * usual);
  return new Set(pauses.flatMap((pause, place) => (pause > long ? [place + 1] : [])));
}

// The mean of several curves in `bins` intervals of x. Where one has no point, its line between its
// neighbours counts, so that the mean does not jump from one member to another; not beyond its ends,
// except for a moment, and not while it was away.
export function meanOf(curves, bins = 200) {
  const xs = curves.flatMap(({ x }) => [x[0], x.at(-1)]);
  const low = Math.min(...xs), width = (Math.max(...xs) - low) / bins || 1;
  const means = curves.map((curve) => binned(curve, low, width, bins));
  const mean = { x: [], y: [] };
  for (const bin of [...new Set(means.flatMap((one) => one.map(({ bin: at }) => at)))].sort((a, b) => a - b)) {
    const values = means.map((one) => between(one, bin, HELD * bins)).filter((value) => value != null);
    const here = means.flatMap((one) => one.filter(({ bin: at }) => at === bin));
    mean.x.push(here.reduce((sum, { x }) => sum + x, 0) / here.length);
    mean.y.push(values.reduce((sum, value) => sum + value, 0) / values.length);
  }
  return mean;
}

// A curve as one point per interval that it has values in, ascending: {bin, x, y, after: a pause}.
function binned({ x, y, gaps: broken = new Set() }, low, width, bins) {
  const cells = new Map();
  let after = false;
  y.forEach((value, at) => {
    after ||= broken.has(at);
    if (!Number.isFinite(value)) return;
    const bin = Math.min(bins - 1, Math.floor((x[at] - low) / width));
    const cell = cells.get(bin) ?? cells.set(bin, { bin, x: 0, y: 0, count: 0, after }).get(bin);
    Object.assign(cell, { x: cell.x + x[at], y: cell.y + value, count: cell.count + 1 });
    after = false;
  });
  return [...cells.values()].map((cell) => ({ ...cell, x: cell.x / cell.count, y: cell.y / cell.count }));
}

// The value of a binned curve at an interval; undefined where it has none.
function between(points, bin, held) {
  const next = points.findIndex(({ bin: at }) => at >= bin);
  const [before, after] = [points[next - 1] ?? (next < 0 ? points.at(-1) : undefined), points[next]];
  if (after?.bin === bin) return after.y;
  if (!before) return undefined;
  if (!after) return bin - before.bin <= held ? before.y : undefined;
  if (after.after) return undefined;
  return before.y + ((after.y - before.y) * (bin - before.bin)) / (after.bin - before.bin);
}

// Index of the value nearest to `at` in ascending numbers; -1 in an empty list.
export function nearest(numbers, at) {
  if (!numbers.length) return -1;
  let low = 0, high = numbers.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (numbers[middle] < at) low = middle; else high = middle;
  }
  return at - numbers[low] <= numbers[high] - at ? low : high;
}
