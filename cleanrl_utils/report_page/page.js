// The report: what is shown of the runs, the statistics over them, the plots as SVG, and the trace of a curve to its runs.
//
// No library. Text from runs becomes text nodes only (see `make`), so a hyperparameter that looks like HTML stays text.
// cleanrl_utils/report.py has put the data into the page, and with them the statistics of the first view; what another
// view needs is computed here by the same formulas (cleanrl_utils/stats.py) when it is looked at.
"use strict";

const D = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);

// ---------------------------------------------------------------------------------------------------- small helpers

// An element with attributes (or "on..." handlers) and children, which are elements or text.
function make(tag, attributes = {}, ...children) {
  const svg = ["svg", "g", "path", "line", "text", "rect", "circle", "clipPath", "title", "tspan"].includes(tag);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

const known = (value) => value !== null && value !== undefined && !Number.isNaN(value);
const sum = (values) => values.reduce((total, value) => total + value, 0);
const mean = (values) => sum(values) / values.length;
const unique = (values) => [...new Set(values)];
const collate = new Intl.Collator("en", { numeric: true }).compare;
const count = (n, word, words = word + "s") => `${n.toLocaleString("en")} ${n === 1 ? word : words}`;
const shortCommit = (commit) => commit.split(" ").map((hash) => hash.slice(0, 10)).join(" ");

// A number for people: about four digits.
function show(value) {
  if (!known(value)) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e7 || size < 1e-3) return value.toExponential(2);
  return value.toFixed(size >= 1000 ? 0 : size >= 100 ? 1 : size >= 0.1 ? 2 : 4);
}

// A tick of an axis: 1500000 -> 1.5M.
function tick(value) {
  const [scale, letter] = Math.abs(value) >= 1e9 ? [1e9, "G"] : Math.abs(value) >= 1e6 ? [1e6, "M"] : Math.abs(value) >= 1e4 ? [1e3, "k"] : [1, ""];
  return String(Number((value / scale).toPrecision(6))) + letter;
}

// The unit of a time axis that ends after so many seconds: [its name, seconds].
const timeUnit = (seconds) => (seconds > 7200 ? ["hours", 3600] : seconds > 120 ? ["minutes", 60] : ["seconds", 1]);
const duration = (seconds) => { const [name, size] = timeUnit(seconds); return `${Number((seconds / size).toPrecision(3))} ${name}`; };

// Round tick positions, about n of them, at 1, 2 or 5 times a power of ten.
function ticks(low, high, n) {
  const rough = (high - low) / n, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((digit) => digit * power).find((candidate) => candidate >= rough);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; i++) found.push(i * step);
  return found;
}

function download(name, blob) {
  const link = make("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

const fileName = (text) => text.replace(/[^\w.-]+/g, "-").replace(/^-+|-+$/g, "") || "plot";

// ------------------------------------------------------------------------------------------------------- statistics
// As in cleanrl_utils/stats.py. Python has filled the cache for the view that the page opens with.

const cache = new Map(Object.entries(D.numbers));
function remembered(key, compute) {
  if (!cache.has(key)) cache.set(key, compute());
  return cache.get(key);
}

// A small seeded generator (mulberry32): the same runs give the same intervals at every visit.
function generator(seed) {
  return () => {
    seed = (seed + 0x6d2b79f5) | 0;
    let bits = Math.imul(seed ^ (seed >>> 15), 1 | seed);
    bits = (bits + Math.imul(bits ^ (bits >>> 7), 61 | bits)) ^ bits;
    return ((bits ^ (bits >>> 14)) >>> 0) / 4294967296;
  };
}

function quantile(sorted, q) {
  const at = q * (sorted.length - 1), low = Math.floor(at);
  return sorted[low] + (at - low) * ((sorted[low + 1] ?? sorted[low]) - sorted[low]);
}

// The 97.5 % quantile of Student's t, tabulated up to 10 degrees of freedom, then by its expansion around the normal.
const T = [NaN, 12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.306, 2.2622, 2.2281];
const Z = 1.959964;
const tQuantile = (df) => T[df] ?? Z + (Z ** 3 + Z) / (4 * df) + (5 * Z ** 5 + 16 * Z ** 3 + 3 * Z) / (96 * df ** 2);

// What a plain bootstrap interval over groups of so many seeds is too short by.
function widening(sizes) {
  const several = sizes.filter((size) => size > 1);
  if (!several.length) return NaN;
  const n = mean(several);
  return (Math.sqrt(n / (n - 1)) * tQuantile(sum(several) - several.length)) / Z;
}

// [point, low, high] of a statistic of groups of scores, one group per environment; seeds are drawn within each.
function bootstrap(groups, statistic, reps = 1000) {
  const random = generator(1), point = statistic(groups), factor = widening(groups.map((group) => group.length));
  const draw = (group) => group.map(() => group[Math.floor(random() * group.length)]);
  const samples = Array.from({ length: reps }, () => statistic(groups.map(draw))).sort((a, b) => a - b);
  const [low, high] = [0.025, 0.975].map((q) => point + (quantile(samples, q) - point) * factor);
  return [point, low, high];
}

// The interquartile mean: without the lowest and the highest quarter of all scores.
function iqm(groups) {
  const values = groups.flat().sort((a, b) => a - b), cut = Math.floor(values.length / 4);
  return mean(values.slice(cut, values.length - cut));
}

const above = (tau) => (groups) => mean(groups.map((group) => group.filter((score) => score > tau).length / group.length));

// The probability that a run of the first half of the groups beats one of the second, by environment; ties count half.
function improvement(groups) {
  const half = groups.length / 2;
  const wins = (x, y) => mean(x.map((a) => mean(y.map((b) => (Math.sign(a - b) + 1) / 2))));
  return mean(groups.slice(0, half).map((x, i) => wins(x, groups[half + i])));
}

const clip = ([point, low, high]) => [point, Math.max(0, low), Math.min(1, high)];

// How often each of n seeds is drawn, and the probability of that draw: every one that there is up to 6 seeds.
const draws = (n) => remembered(`draws ${n}`, () => {
  if (n > 6) {
    const random = generator(n);
    return Array.from({ length: 1000 }, () => {
      const counts = new Array(n).fill(0);
      for (let i = 0; i < n; i++) counts[Math.floor(random() * n)]++;
      return [counts, 1 / 1000];
    });
  }
  const factorial = (k) => (k > 1 ? k * factorial(k - 1) : 1), all = [];
  const fill = (counts, left) => {
    if (counts.length < n - 1) for (let k = 0; k <= left; k++) fill([...counts, k], left - k);
    else {
      const full = [...counts, left];
      all.push([full, factorial(n) / full.reduce((product, k) => product * factorial(k), 1) / n ** n]);
    }
  };
  fill([], n);
  return all;
});

// The interval of the mean at one point of several runs' curves, null where a run has no value: [low, high].
function meanInterval(values) {
  const present = values.filter(known), centre = mean(present);
  if (present.length < 2) return [null, null];
  const samples = [];
  for (const [counts, weight] of draws(values.length)) {
    let total = 0, n = 0;
    values.forEach((value, i) => { if (known(value)) { total += counts[i] * (value - centre); n += counts[i]; } });
    if (n) samples.push([total / n, weight]);
  }
  samples.sort((a, b) => a[0] - b[0]);
  const mass = sum(samples.map((sample) => sample[1])), factor = widening([present.length]);
  return [0.025, 0.975].map((q) => {
    let seen = 0;
    const found = samples.find((sample) => (seen += sample[1]) >= q * mass - 1e-12) ?? samples[samples.length - 1];
    return centre + found[0] * factor;
  });
}

// ----------------------------------------------------------------------------------------------------------- curves
// A curve of a run is [end, values]: the means of equal bins from 0 to its end, null where a bin is empty.

const centres = (end, n) => Array.from({ length: n }, (_, i) => ((i + 0.5) / n) * end);

// The curve at other places, by straight lines between its points; null before the first and after the last of them.
function interpolate(x, y, places) {
  const at = x.map((_, i) => i).filter((i) => known(y[i]));
  let i = 0;
  const slack = 1e-9 * (x[x.length - 1] ?? 0);
  return places.map((place) => {
    while (i < at.length - 2 && x[at[i + 1]] < place) i++;
    const [a, b] = [at[i], at[Math.min(i + 1, at.length - 1)]];
    if (a === undefined || place < x[a] - slack || place > x[b] + slack) return null;
    return a === b || x[a] === x[b] ? y[a] : y[a] + ((y[b] - y[a]) * (place - x[a])) / (x[b] - x[a]);
  });
}

// A moving average over `reach` points on either side.
function smoothed(values, reach) {
  if (!reach) return values;
  return values.map((value, i) => (known(value) ? mean(values.slice(Math.max(0, i - reach), i + reach + 1).filter(known)) : value));
}

function runCurve(run, view) {
  const curve = run.curves[view.metric]?.[view.x];
  return curve ? { end: curve[0], x: centres(curve[0], curve[1].length), y: smoothed(curve[1], view.smooth) } : null;
}

// Mean and interval of several runs on a common grid, drawn as far as more than half of them go.
function groupCurve(runs, view) {
  const own = runs.map((run) => runCurve(run, view)).filter(Boolean);
  if (!own.length) return null;
  const end = Math.max(...own.map((curve) => curve.end)), n = Math.max(...own.map((curve) => curve.x.length));
  const x = centres(end, n), rows = own.map((curve) => interpolate(curve.x, curve.y, x));
  const columns = x.map((_, i) => rows.map((row) => row[i]));
  const counts = columns.map((column) => column.filter(known).length);
  const drawn = counts.map((there) => 2 * there > own.length);
  const y = columns.map((column, i) => (drawn[i] ? mean(column.filter(known)) : null));
  let low = [], high = [];
  if (own.length > 1) {
    const key = `band ${view.metric} ${view.x} ${view.smooth} ${runs.map((run) => run.index)}`;
    [low, high] = remembered(key, () => {
      const pairs = columns.map(meanInterval);
      return [pairs.map((pair) => pair[0]), pairs.map((pair) => pair[1])];
    });
    [low, high] = [low, high].map((side) => side.map((value, i) => (drawn[i] ? value : null)));
  }
  return { x, y, low, high, counts, of: own.length };
}

// ------------------------------------------------------------------------------- what is shown: state, filter, groups

D.runs.forEach((run, index) => {
  run.index = index;
  run.args = { ...D.bases[run.algo], ...run.args };
  run.packages = D.packages[run.packages];
  run.text = `${run.id} ${run.env} ${run.algo} ${run.commit} ${run.command}`.toLowerCase();
});
const runById = new Map(D.runs.map((run) => [run.id, run]));
const metricName = (tag) => (tag === "charts/episodic_return" ? "Episodic return" : tag);

const FRESH = { q: "", env: [], algo: [], commit: "", by: "algorithm", metric: D.metrics[0], x: "steps", sort: "name",
  smooth: D.smooth, seeds: false, refs: false, suite: "", base: "", run: "", group: "", video: "" };
let state = { ...FRESH };

// The part of the address after # holds what differs from the fresh page, so that a view can be sent to somebody.
function hashOf(view) {
  const words = new URLSearchParams();
  for (const [key, fresh] of Object.entries(FRESH))
    for (const value of [view[key]].flat()) if (String(value) !== String(fresh)) words.append(key, value === true ? 1 : value);
  return `#${words}`;
}

function readHash() {
  const words = new URLSearchParams(location.hash.slice(1)), view = { ...FRESH };
  if (location.hash && ![...words.keys()].some((key) => key in FRESH)) return;  // a link to a part of the page
  for (const key of Object.keys(FRESH)) {
    if (!words.has(key)) continue;
    const value = words.get(key);
    view[key] = Array.isArray(FRESH[key]) ? words.getAll(key) : typeof FRESH[key] === "boolean" ? value === "1" : typeof FRESH[key] === "number" ? Number(value) || 0 : value;
  }
  if (!D.metrics.includes(view.metric)) view.metric = FRESH.metric;
  if (!["steps", "time"].includes(view.x)) view.x = FRESH.x;
  view.smooth = Math.min(20, Math.max(0, Math.round(view.smooth)));
  state = view;
}

// Change what is shown. Tracing a run is a step of the browser's history, turning a knob is not.
function change(part) {
  state = { ...state, ...part };
  const step = "run" in part || "group" in part;
  history[step ? "pushState" : "replaceState"](null, "", hashOf(state));
  render();
}

// One word of a search: learning_rate=0.001, seed<3, gamma!=0.99, or any part of a run's name, command or commit.
function matches(run, word) {
  const found = /^([\w.-]+?)(!=|<=|>=|=|<|>)(.*)$/.exec(word);
  if (!found) return run.text.includes(word.toLowerCase());
  const [, name, sign, wanted] = found, key = name.replaceAll("-", "_").replace(/^_+/, "");
  const fields = { seed: run.seed, commit: run.commit, env: run.env, env_id: run.env, algo: run.algo, algorithm: run.algo, score: run.score, exp_name: run.algo };
  const value = fields[key] ?? run.args[key];
  if (value === undefined) return false;
  const [a, b] = [Number(value), Number(wanted)], numbers = wanted !== "" && typeof value !== "boolean" && !Number.isNaN(a) && !Number.isNaN(b);
  const equal = numbers ? a === b : key === "commit" ? String(value).startsWith(wanted) : String(value).toLowerCase() === wanted.toLowerCase();
  if (sign === "=") return equal;
  if (sign === "!=") return !equal;
  return numbers && { "<": a < b, ">": a > b, "<=": a <= b, ">=": a >= b }[sign];
}

function shownRuns() {
  const words = state.q.split(/\s+/).filter(Boolean);
  return D.runs.filter((run) =>
    (!state.env.length || state.env.includes(run.env)) && (!state.algo.length || state.algo.includes(run.algo)) &&
    (!state.commit || run.commit === state.commit) && words.every((word) => matches(run, word)));
}

// What a run is grouped under. Runs of one algorithm and environment with different numbers of steps are kept apart.
function nameOf(run) {
  if (state.by === "algorithm") return run.algo;
  if (state.by === "commit") return `${run.algo} @ ${shortCommit(run.commit) || "?"}`;
  return `${run.algo} · ${state.by}=${run.args[state.by] ?? "–"}`;
}
const labelOf = (run) => nameOf(run) + (run.budget ? ` · ${tick(run.total)} steps` : "");

// The groups of one environment, or of all: [{env, label, name, runs}], by name.
function groupsOf(runs) {
  const groups = new Map();
  for (const run of runs) {
    const key = `${run.env}\n${labelOf(run)}`;
    if (!groups.has(key)) groups.set(key, { env: run.env, label: labelOf(run), name: nameOf(run), runs: [] });
    groups.get(key).runs.push(run);
  }
  return [...groups.values()].sort((a, b) => collate(a.env, b.env) || collate(a.label, b.label));
}

const ended = (runs) => runs.filter((run) => run.ended && known(run.score));

// Mean, interval and deviation of the scores of a group's runs that have ended.
function scoreOf(group) {
  const runs = ended(group.runs), scores = runs.map((run) => run.score);
  if (!scores.length) return { n: 0, mean: null, low: null, high: null };
  const [middle, low, high] = remembered(`score ${runs.map((run) => run.index)}`, () => bootstrap([scores], (groups) => mean(groups[0])));
  return { n: scores.length, mean: middle, low, high };
}

// ------------------------------------------------------------------------------------------- colours, told apart by all

const COLOURS = {
  light: ["#0072B2", "#D55E00", "#009E73", "#C2559A", "#A87900", "#56B4E9", "#6B6B6B"],
  dark: ["#4DA6E8", "#F08A3C", "#2EC59B", "#E48CC8", "#F0E442", "#A6DCFF", "#B9B9B9"],
};
const DASHES = ["", "7 3", "2 3", "9 3 2 3"];
const INKS = {
  light: { ink: "#1c2026", soft: "#5b6470", line: "#e3e7ec", back: "#ffffff" },
  dark: { ink: "#e6e9ee", soft: "#a0a9b5", line: "#303741", back: "#1b1f25" },
};
const dark = () => document.documentElement.dataset.theme === "dark";
const themeOf = (name) => ({ ...INKS[name], colours: COLOURS[name] });
const theme = () => themeOf(dark() ? "dark" : "light");

// Each label gets the first colour (then dash) that no label in one of its environments has: neighbours differ.
let looks = new Map();
function assignLooks() {
  looks = new Map();
  const groups = groupsOf(D.runs), inEnv = new Map();
  for (const group of groups) inEnv.set(group.env, [...(inEnv.get(group.env) ?? []), group.label]);
  const envs = (label) => groups.filter((group) => group.label === label).map((group) => group.env);
  const labels = unique(groups.map((group) => group.label)).map((label) => [label, envs(label)]);
  for (const [label, places] of labels.sort((a, b) => b[1].length - a[1].length || collate(a[0], b[0]))) {
    const taken = new Set(places.flatMap((env) => inEnv.get(env)).map((other) => looks.get(other)));
    let look = 0;
    while (taken.has(look) && look < COLOURS.light.length * DASHES.length - 1) look++;
    looks.set(label, look);
  }
}
const colour = (label, inks = theme()) => inks.colours[(looks.get(label) ?? 0) % inks.colours.length];
const dash = (label) => DASHES[Math.floor((looks.get(label) ?? 0) / COLOURS.light.length)];

function swatch(label) {
  const line = make("line", { x1: 0, x2: 26, y1: 6, y2: 6, stroke: colour(label), "stroke-width": 3, "stroke-dasharray": dash(label) });
  return make("svg", { class: "swatch", viewBox: "0 0 26 12", "aria-hidden": "true" }, line);
}

// ------------------------------------------------------------------------------------------------------------ plotting

const WIDTH = 480, HEIGHT = 290, MARGIN = { left: 54, right: 20, top: 22, bottom: 38 };
let plots = 0;

// The range of y that shows all means of the visible part, and of the intervals what lies near them.
function yRange(series, [from, to], lines) {
  let low = Infinity, high = -Infinity;
  const inside = (s, i) => s.x[i] >= from && s.x[i] <= to;
  const each = (s, values, use) => values?.forEach((value, i) => { if (known(value) && inside(s, i)) use(value); });
  for (const s of series) each(s, s.y, (value) => { low = Math.min(low, value); high = Math.max(high, value); });
  for (const line of lines) { low = Math.min(low, line.y); high = Math.max(high, line.y); }
  if (low === Infinity) return [0, 1];
  const reach = 0.3 * (high - low || Math.abs(high) || 1), [least, most] = [low - reach, high + reach];
  for (const s of series) for (const side of [s.low, s.high])
    each(s, side, (value) => { low = Math.min(low, Math.max(least, value)); high = Math.max(high, Math.min(most, value)); });
  const pad = 0.04 * (high - low || Math.abs(high) || 1);
  return [low - pad, high + pad];
}

function linePath(s, x, y) {
  let path = "";
  s.x.forEach((value, i) => { if (known(s.y[i])) path += `${path ? "L" : "M"}${x(value).toFixed(1)} ${y(s.y[i]).toFixed(1)}`; });
  return path;
}

function bandPath(s, x, y) {
  const at = s.x.map((_, i) => i).filter((i) => known(s.low[i]) && known(s.high[i]));
  if (at.length < 2) return "";
  const point = (i, value) => `${x(s.x[i]).toFixed(1)} ${y(value).toFixed(1)}`;
  return `M${at.map((i) => point(i, s.high[i])).join("L")}L${at.reverse().map((i) => point(i, s.low[i])).join("L")}Z`;
}

// Axes with their ticks, which are texts and grid lines.
function axes(box, xs, ys, spec, inks) {
  const parts = [], text = { fill: inks.soft, "font-size": 12 };
  for (const value of ticks(...ys.range, 5)) {
    parts.push(make("line", { x1: box.left, x2: box.right, y1: ys.to(value), y2: ys.to(value), stroke: inks.line }));
    parts.push(make("text", { ...text, x: box.left - 6, y: ys.to(value) + 4, "text-anchor": "end" }, tick(value)));
  }
  const unit = spec.x.unit ?? 1;
  for (const value of ticks(xs.range[0] / unit, xs.range[1] / unit, 5)) {
    const x = xs.to(value * unit);
    parts.push(make("line", { x1: x, x2: x, y1: box.bottom, y2: box.bottom + 4, stroke: inks.soft }));
    parts.push(make("text", { ...text, x, y: box.bottom + 17, "text-anchor": "middle" }, tick(value)));
  }
  parts.push(make("line", { x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom, stroke: inks.soft }));
  parts.push(make("text", { ...text, x: (box.left + box.right) / 2, y: box.bottom + 33, "text-anchor": "middle" }, spec.x.label));
  parts.push(make("text", { ...text, x: box.left, y: box.top - 9 }, spec.y.label ?? ""));
  return parts;
}

// What the page has around a plot and a file needs in it: the title above, the names of the series below.
function titleAndLegend(spec, series, inks, bottom, full) {
  const parts = [make("text", { x: 8, y: -8, fill: inks.ink, "font-size": 14, "font-weight": 600 }, spec.title)];
  const columns = 2, width = full / columns;
  series.forEach((s, i) => {
    const x = 10 + (i % columns) * width, y = bottom + 8 + Math.floor(i / columns) * 18;
    parts.push(make("line", { x1: x, x2: x + 22, y1: y, y2: y, stroke: s.colour, "stroke-width": 2.5, "stroke-dasharray": s.dash }));
    parts.push(make("text", { x: x + 28, y: y + 4, fill: inks.ink, "font-size": 12 }, s.name));
  });
  return parts;
}

// Curves as an SVG element of its own, with the scales to find one's way in it. `whole` is for a file.
function plot(spec, zoom, inks, whole = false, width = WIDTH) {
  const named = spec.series.filter((s) => !s.faint);
  const top = whole ? 30 : 0, below = whole ? 12 + 18 * Math.ceil(named.length / 2) : 0;
  const box = { left: MARGIN.left, right: width - MARGIN.right, top: MARGIN.top, bottom: HEIGHT - MARGIN.bottom };
  const full = spec.x.range ?? [0, Math.max(...spec.series.map((s) => s.end), 1e-9)];
  const xRange = zoom?.x ?? full, lines = spec.lines ?? [], range = zoom?.y ?? spec.y.range ?? yRange(spec.series, xRange, lines);
  const scale = ([from, to], [a, b]) => ({ range: [from, to], to: (value) => a + ((value - from) / (to - from)) * (b - a), from: (pixel) => from + ((pixel - a) / (b - a)) * (to - from) });
  const xs = scale(xRange, [box.left, box.right]), ys = scale(range, [box.bottom, box.top]);
  const clipId = `clip${++plots}`, data = make("g", { "clip-path": `url(#${clipId})`, fill: "none", "stroke-linejoin": "round" });
  const shade = named.length > 4 ? 0.05 : 0.17;  // many bands hide each other: then one is seen when the pointer is near
  spec.series.forEach((s, i) => { if (s.low?.length) data.append(make("path", { class: "band", "data-series": i, d: bandPath(s, xs.to, ys.to), fill: s.colour, "fill-opacity": shade })); });
  for (const line of lines)
    data.append(make("line", { x1: box.left, x2: box.right, y1: ys.to(line.y), y2: ys.to(line.y), stroke: line.colour, "stroke-width": 1.3, "stroke-dasharray": "1.5 4", "stroke-linecap": "round" }));
  spec.series.forEach((s, i) => data.append(make("path", { class: "curve", "data-series": i, d: linePath(s, xs.to, ys.to), stroke: s.colour, "stroke-width": s.faint ? 1 : 2, "stroke-opacity": s.faint ? 0.45 : 1, "stroke-dasharray": s.dash })));
  for (const s of spec.series) for (const marker of s.markers ?? []) {
    const [x, y] = [xs.to(marker.x), ys.to(marker.y)];
    const shape = make("path", { class: "marker", d: `M${x - 4} ${y - 6}L${x + 7} ${y}L${x - 4} ${y + 6}Z`, fill: s.colour, stroke: inks.back, "stroke-width": 1.2, style: "cursor:pointer" }, make("title", {}, marker.text));
    if (marker.pick) shape.addEventListener("click", (event) => { event.stopPropagation(); marker.pick(); });
    data.append(shape);
  }
  const svg = make("svg", { viewBox: `0 ${-top} ${width} ${HEIGHT + top + below}`, role: "img", "aria-label": spec.describe ?? spec.title, "font-family": "system-ui, 'DejaVu Sans', sans-serif", "data-x": xRange.join(" ") },
    make("clipPath", { id: clipId }, make("rect", { x: box.left, y: box.top - 2, width: box.right - box.left, height: box.bottom - box.top + 4 })),
    axes(box, xs, ys, spec, inks), data, whole ? titleAndLegend(spec, named, inks, HEIGHT, width) : []);
  if (!named.length && !spec.series.length) svg.append(make("text", { x: width / 2, y: HEIGHT / 2, fill: inks.soft, "text-anchor": "middle", "font-size": 14 }, spec.empty ?? "nothing to show"));
  return { svg, xs, ys, box, full, spec, width, shade };
}

// Points with their intervals, one row each, as an SVG element.
function intervalPlot(spec, inks, whole = false) {
  const row = 22, left = 170, right = WIDTH - 60, bottom = 12 + row * spec.rows.length, top = whole ? 30 : 0;
  const values = spec.rows.flatMap((r) => [r.point, r.low, r.high]).filter(known);
  let [low, high] = spec.range ?? [Math.min(...values), Math.max(...values)];
  if (!(high > low)) [low, high] = [low - 0.5, low + 0.5];
  const to = (value) => left + ((value - low) / (high - low)) * (right - left), inside = (value) => Math.min(right, Math.max(left, to(value)));
  const text = { fill: inks.soft, "font-size": 12 };
  const svg = make("svg", { viewBox: `0 ${-top} ${WIDTH} ${bottom + 42 + top}`, role: "img", "aria-label": spec.describe ?? spec.title, "font-family": "system-ui, 'DejaVu Sans', sans-serif" });
  for (const value of ticks(low, high, 6))
    svg.append(make("line", { x1: to(value), x2: to(value), y1: 6, y2: bottom, stroke: inks.line }), make("text", { ...text, x: to(value), y: bottom + 16, "text-anchor": "middle" }, tick(value)));
  if (known(spec.line)) svg.append(make("line", { x1: to(spec.line), x2: to(spec.line), y1: 4, y2: bottom, stroke: inks.soft, "stroke-dasharray": "3 3" }));
  spec.rows.forEach((r, i) => {
    const y = 12 + row * (i + 0.5), name = r.name.length > 25 ? `${r.name.slice(0, 24)}…` : r.name;
    svg.append(make("text", { x: left - 10, y: y + 4, "text-anchor": "end", fill: inks.ink, "font-size": 12 }, name, make("title", {}, r.name)));
    if (known(r.low)) svg.append(make("line", { x1: inside(r.low), x2: inside(r.high), y1: y, y2: y, stroke: r.colour, "stroke-width": 7, "stroke-opacity": 0.4 }));
    svg.append(make("circle", { cx: inside(r.point), cy: y, r: 4.5, fill: r.colour }), make("text", { ...text, x: right + 8, y: y + 4 }, show(r.point)));
  });
  svg.append(make("text", { ...text, x: (left + right) / 2, y: bottom + 33, "text-anchor": "middle" }, spec.x));
  if (whole) svg.append(make("text", { x: 8, y: -8, fill: inks.ink, "font-size": 14, "font-weight": 600 }, spec.title));
  return { svg };
}

// A plot as a file: always on white, with its title and legend in it.
function exportSvg(paint, title) {
  const { svg } = paint(themeOf("light"), true), [x, y, width, height] = svg.getAttribute("viewBox").split(" ");
  svg.setAttribute("width", width);
  svg.setAttribute("height", height);
  svg.prepend(make("rect", { x, y, width, height, fill: "#ffffff" }));
  return { name: fileName(title), width: Number(width), height: Number(height), text: new XMLSerializer().serializeToString(svg) };
}

function saveSvg(paint, title) {
  const file = exportSvg(paint, title);
  download(`${file.name}.svg`, new Blob([file.text], { type: "image/svg+xml" }));
}

async function savePng(paint, title) {
  const file = exportSvg(paint, title), image = new Image(), canvas = make("canvas", { width: file.width * 3, height: file.height * 3 });
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(file.text)}`;
  await image.decode();
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  canvas.toBlob((blob) => download(`${file.name}.png`, blob), "image/png");
}

const button = (text, label, action) => make("button", { type: "button", "aria-label": label, title: label, onclick: action }, text);

// ------------------------------------------------------------------------------------------- a chart that can be zoomed

// A figure around plot(): `spec(inks)` says what to draw in which colours, `pick(series)` is called at a click on a curve.
function chart(title, spec, pick, heading = "h3") {
  let zoom = null, drawn = null, start = null;
  const holder = make("div", {}), readout = make("div", { class: "readout", hidden: true });
  const paint = (inks, whole) => plot(spec(inks), zoom, inks, whole);
  const draw = () => {
    const focused = holder.contains(document.activeElement);
    drawn = plot(spec(theme()), zoom, theme(), false, Math.min(1000, Math.max(280, holder.clientWidth || WIDTH)));
    drawn.svg.setAttribute("tabindex", 0);
    holder.replaceChildren(drawn.svg);
    if (focused) drawn.svg.focus({ preventScroll: true });
    readout.hidden = true;
  };
  const setZoom = (x, y = null) => {
    const [from, to] = drawn.full, width = Math.min(to - from, Math.max((to - from) / 2000, x[1] - x[0]));
    const left = Math.min(Math.max(from, x[0]), to - width);
    zoom = width >= 0.999 * (to - from) && !y ? null : { x: [left, left + width], y };
    draw();
  };
  const scaleBy = (factor, centre) => {
    const [from, to] = drawn.xs.range, middle = centre ?? (from + to) / 2;
    setZoom([middle - (middle - from) * factor, middle + (to - middle) * factor]);
  };
  const reset = () => { zoom = null; draw(); };
  const shift = (part) => { const [from, to] = drawn.xs.range, by = (to - from) * part; setZoom([from + by, to + by], zoom?.y); };
  // Where a pointer is, in the plot's own units.
  const place = (event) => {
    const area = drawn.svg.getBoundingClientRect();
    return { x: ((event.clientX - area.left) / area.width) * drawn.width, y: ((event.clientY - area.top) / area.height) * HEIGHT };
  };
  // The series that comes nearest to a place, with the index of its point there.
  const nearest = (at) => {
    const wanted = drawn.xs.from(at.x);
    let best = null;
    for (const s of drawn.spec.series) {
      const i = indexAt(s, wanted);
      if (i === null) continue;
      const distance = Math.abs(drawn.ys.to(s.y[i]) - at.y) + (s.faint ? 3 : 0);
      if (!best || distance < best.distance) best = { s, i, distance };
    }
    return best;
  };
  // The curve under the pointer stands out, the others step back.
  const highlight = (best) => {
    const chosen = best && best.distance < 16 ? drawn.spec.series.indexOf(best.s) : null;
    for (const path of drawn.svg.querySelectorAll("[data-series]")) {
      const own = Number(path.dataset.series) === chosen;
      path.setAttribute("opacity", chosen === null || own ? 1 : 0.35);
      if (path.classList.contains("band")) path.setAttribute("fill-opacity", own ? 0.28 : drawn.shade);
    }
  };
  const leave = () => { readout.hidden = true; highlight(null); };
  const hover = (at) => {
    if (at.x < drawn.box.left || at.x > drawn.box.right) return leave();
    readout.hidden = false;
    const best = nearest(at), wanted = drawn.xs.from(at.x), current = drawn.spec;
    highlight(best);
    const rows = current.series.filter((s) => !s.faint || s === best?.s).map((s) => ({ s, i: indexAt(s, wanted) })).filter((r) => r.i !== null);
    rows.sort((a, b) => b.s.y[b.i] - a.s.y[a.i]);
    const lines = rows.slice(0, 12).map(({ s, i }) => make("div", { class: best && s.name === best.s.name ? "near" : "" },
      make("span", { style: `color:${s.colour}` }, "■ "), `${s.name}: ${show(s.y[i])}`,
      known(s.low?.[i]) ? ` [${show(s.low[i])}, ${show(s.high[i])}]` : "", s.counts && s.of > 1 ? ` ${s.counts[i]} of ${s.of} runs` : ""));
    const unit = current.x.unit ?? 1;
    readout.replaceChildren(make("div", {}, `${current.x.label} ${show(wanted / unit)}`.replace(/^(environment steps) .*/, `step ${Math.round(wanted).toLocaleString("en")}`)), ...lines);
    const wide = holder.clientWidth / drawn.width, right = at.x > drawn.width / 2;
    readout.style.cssText = `top:${holder.offsetTop + 4}px;${right ? `right:${(drawn.width - at.x + 14) * wide + 8}px` : `left:${(at.x + 14) * wide + 8}px`}`;
  };
  const touches = new Map();
  const selection = make("rect", { fill: "#56B4E9", "fill-opacity": 0.2, stroke: "#56B4E9" });
  holder.addEventListener("pointerdown", (event) => {
    if (event.pointerType === "touch") touches.set(event.pointerId, event);
    else if (event.button === 0) start = place(event);
  });
  holder.addEventListener("pointermove", (event) => {
    const at = place(event);
    if (touches.has(event.pointerId) && touches.size === 2) {  // two fingers: zoom by the change of their distance
      const other = [...touches.values()].find((touch) => touch.pointerId !== event.pointerId), before = touches.get(event.pointerId);
      const [old, now] = [before, event].map((touch) => Math.max(20, Math.abs(touch.clientX - other.clientX)));
      touches.set(event.pointerId, event);
      return scaleBy(old / now, drawn.xs.from((at.x + place(other).x) / 2));
    }
    if (start && Math.hypot(at.x - start.x, at.y - start.y) > 5) {
      const flat = Math.abs(at.y - start.y) < 14;  // a flat drag zooms steps only
      const [y, height] = flat ? [drawn.box.top, drawn.box.bottom - drawn.box.top] : [Math.min(at.y, start.y), Math.abs(at.y - start.y)];
      for (const [name, value] of Object.entries({ x: Math.min(at.x, start.x), y, width: Math.abs(at.x - start.x), height })) selection.setAttribute(name, value);
      drawn.svg.append(selection);
      holder.setPointerCapture(event.pointerId);
      readout.hidden = true;
    } else hover(at);
  });
  const finish = (event) => {
    touches.delete(event.pointerId);
    if (!start) return;
    const at = place(event), from = start;
    start = null;
    selection.remove();
    if (Math.abs(at.x - from.x) > 5) {
      const [x, y] = [[from.x, at.x].sort((a, b) => a - b).map(drawn.xs.from), [at.y, from.y].sort((a, b) => b - a).map(drawn.ys.from)];
      setZoom(x, Math.abs(at.y - from.y) < 14 ? null : y);
      holder.dataset.dragged = "1";
      setTimeout(() => delete holder.dataset.dragged, 0);
    }
  };
  holder.addEventListener("pointerup", finish);
  holder.addEventListener("pointercancel", (event) => { touches.delete(event.pointerId); start = null; selection.remove(); });
  holder.addEventListener("pointerleave", leave);
  holder.addEventListener("click", (event) => {
    const best = nearest(place(event));
    if (pick && best && best.distance < 16 && !holder.dataset.dragged) pick(best.s);
  });
  holder.addEventListener("dblclick", reset);
  holder.addEventListener("wheel", (event) => {  // a pinch on a touchpad comes as a wheel with Ctrl
    if (!event.ctrlKey && !event.metaKey && !holder.contains(document.activeElement)) return;
    event.preventDefault();
    scaleBy(event.deltaY > 0 ? 1.25 : 0.8, drawn.xs.from(place(event).x));
  }, { passive: false });
  holder.addEventListener("keydown", (event) => {
    const action = { "+": () => scaleBy(0.6), "=": () => scaleBy(0.6), "-": () => scaleBy(1 / 0.6), 0: reset, ArrowLeft: () => shift(-0.2), ArrowRight: () => shift(0.2) }[event.key];
    if (!action || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    action();
  });
  const tools = make("div", { class: "tools", role: "group", "aria-label": `Tools of the plot ${title}` },
    button("+", "zoom in", () => scaleBy(0.6)), button("−", "zoom out", () => scaleBy(1 / 0.6)), button("⤢", "show all", reset),
    button("SVG", "save as SVG", () => saveSvg(paint, title)), button("PNG", "save as PNG", () => savePng(paint, title)));
  const figure = make("figure", { "data-title": title }, make("div", { class: "head" }, make(heading, {}, title), tools), holder, readout);
  figure.redraw = () => drawn && holder.isConnected && draw();
  return { figure, draw };
}

// The index of the last known point of a series near a place, null if that is outside of it.
function indexAt(s, wanted) {
  if (!s.x.length || wanted < 0 || wanted > s.end) return null;
  const i = Math.min(s.x.length - 1, Math.floor((wanted / s.end) * s.x.length));
  for (let d = 0; d < s.x.length; d++) for (const j of [i - d, i + d]) if (known(s.y[j])) return d <= 3 ? j : null;
  return null;
}

// A figure around a plot that needs no zoom.
function still(title, paint) {
  const tools = make("div", { class: "tools" }, button("SVG", "save as SVG", () => saveSvg(paint, title)), button("PNG", "save as PNG", () => savePng(paint, title)));
  return make("figure", { class: "empty", "data-title": title }, make("div", { class: "head" }, make("h3", {}, title), tools), paint(theme(), false).svg);
}

// --------------------------------------------------------------------------------------------------- learning curves

function xAxis(series) {
  if (state.x === "steps") return { label: "environment steps" };
  const [name, unit] = timeUnit(Math.max(...series.map((s) => s.end), 1));
  return { label: `${name} of training`, unit };
}

// Where a run's videos lie on a curve.
function markersOf(run, curve) {
  const markers = [];
  for (const [step, seconds, path] of run.videos) {
    const x = state.x === "steps" ? step : seconds;
    if (!known(x) || !curve) continue;
    const i = indexAt({ ...curve, end: Math.max(curve.end, x) }, x) ?? curve.y.findIndex(known);
    if (i >= 0) markers.push({ x, y: curve.y[i], text: `video at step ${step.toLocaleString("en")}, seed ${run.seed}`, pick: () => change({ run: run.id, group: "", video: path }) });
  }
  return markers;
}

function runSeries(run, label, inks, faint = true) {
  const curve = runCurve(run, state);
  return curve && { name: `seed ${run.seed}`, colour: colour(label, inks), dash: "", faint, x: curve.x, y: curve.y, end: curve.end, run };
}

function groupSeries(group, inks) {
  const curve = groupCurve(group.runs, state);
  if (!curve) return null;
  const end = curve.x[curve.x.length - 1] / (1 - 0.5 / curve.x.length);
  const series = { name: group.label, colour: colour(group.label, inks), dash: dash(group.label), end, group, ...curve };
  series.markers = group.runs.filter((run) => run.videos.length).slice(0, 1).flatMap((run) => markersOf(run, series));
  return series;
}

// The published scores of the scripts in some groups, as lines.
function referenceLines(groups, inks) {
  if (state.metric !== D.metrics[0]) return [];
  const lines = groups.map((group) => ({ y: group.runs[0].reference?.[0], colour: colour(group.label, inks) }));
  return lines.filter((line) => known(line.y));
}

function envSpec(groups, title) {
  return (inks) => {
    const means = groups.map((group) => groupSeries(group, inks)).filter(Boolean);
    const single = state.seeds ? groups.flatMap((group) => group.runs.map((run) => runSeries(run, group.label, inks))).filter(Boolean) : [];
    const series = [...single.map((s) => ({ ...s, group: null })), ...means];
    const empty = state.x === "time" ? "no wall times recorded" : "no values yet";
    return { title, series, x: xAxis(series), y: { label: metricName(state.metric) }, lines: state.refs ? referenceLines(groups, inks) : [], empty, describe: describe(title, groups) };
  };
}

// A plot in words.
function describe(title, groups) {
  const parts = groups.map((group) => { const score = scoreOf(group); return `${group.label} ${show(score.mean)} (${count(group.runs.length, "run")})`; });
  return `${metricName(state.metric)} in ${title}. Scores: ${parts.join(", ")}.`;
}

const groupKey = (group) => `${group.env}|${group.label}`;

function legend(groups) {
  return make("div", { class: "legend" }, groups.map((group) => {
    const score = scoreOf(group), running = group.runs.filter((run) => !run.ended).length;
    const notes = [score.n ? show(score.mean) : "", count(group.runs.length, "run"), running ? `${running} not ended` : ""].filter(Boolean);
    const mixed = differing(group.runs).length ? make("small", { title: `its runs differ in ${differing(group.runs).join(", ")}` }, " ≠") : null;
    return make("button", { type: "button", "data-key": groupKey(group), "aria-pressed": state.group === groupKey(group), title: "trace to its runs", onclick: () => change({ group: groupKey(group), run: "", video: "" }) },
      swatch(group.label), group.label, " ", make("small", {}, notes.join(", ")), mixed);
  }));
}

// Charts are drawn when they come near the screen: a report may have hundreds.
const watcher = new IntersectionObserver((entries) => {
  for (const entry of entries) if (entry.isIntersecting) { watcher.unobserve(entry.target); entry.target.begin(); }
}, { rootMargin: "400px" });

function renderCurves(runs) {
  watcher.disconnect();
  const groups = groupsOf(runs), envs = unique(groups.map((group) => group.env));
  const inEnv = new Map(envs.map((env) => [env, groups.filter((group) => group.env === env)]));
  const best = (env) => Math.max(...inEnv.get(env).map((group) => scoreOf(group).mean ?? -Infinity));
  const size = (env) => sum(inEnv.get(env).map((group) => group.runs.length));
  if (state.sort === "score") envs.sort((a, b) => best(b) - best(a));
  if (state.sort === "runs") envs.sort((a, b) => size(b) - size(a) || collate(a, b));
  const missing = sum(runs.map((run) => (run.curves[state.metric]?.[state.x] ? 0 : 1)));
  const figures = envs.map((env) => {
    const own = inEnv.get(env), here = chart(env, envSpec(own, env), (s) => (s.run ? change({ run: s.run.id, group: "", video: "" }) : change({ group: groupKey(s.group), run: "", video: "" })));
    const single = own.filter((group) => group.runs.length === 1).length;
    const holder = here.figure.children[1];
    holder.className = "placeholder";
    here.figure.begin = () => { holder.className = ""; here.draw(); here.figure.append(legend(own)); if (single) here.figure.append(make("p", { class: "warn" }, `One run has no interval${single < own.length ? ` (${single} of ${own.length} curves)` : ""}.`)); };
    return here.figure;
  });
  $("charts").replaceChildren(...figures);
  figures.forEach((figure) => watcher.observe(figure));
  return missing;
}

// ------------------------------------------------------------------------------------------------------- aggregates

// The sets of environments in which two or more groups can be compared, those with most results first.
function suites(byName) {
  const sets = new Map();
  for (const envs of byName.values()) {
    const names = [...envs.keys()].sort(collate);
    sets.set(names.join(" "), names);
  }
  const found = [...sets.values()].map((envs) => ({ envs, names: [...byName.keys()].filter((name) => envs.every((env) => byName.get(name).has(env))) }));
  return found.filter((suite) => suite.names.length > 1).sort((a, b) => b.envs.length * b.names.length - a.envs.length * a.names.length || collate(a.envs.join(), b.envs.join()));
}

// name -> environment -> its ended runs with the most steps, of environments with a scale.
function comparable(runs) {
  const byName = new Map();
  for (const run of ended(runs)) {
    if (!D.norm[run.env]) continue;
    const envs = byName.get(nameOf(run)) ?? new Map(), others = envs.get(run.env) ?? [];
    if (others.length && others[0].total > run.total) continue;
    envs.set(run.env, [...others.filter((other) => other.total === run.total), run]);
    byName.set(nameOf(run), envs);
  }
  return byName;
}

const normalised = (run) => { const [low, high] = D.norm[run.env]; return (run.score - low) / (high - low); };
const keyOf = (groups) => groups.map((group) => group.map((run) => run.index)).join(";");

function fill(select, options, value) {
  select.replaceChildren(...options.map(([key, text]) => make("option", { value: key, selected: key === value }, text)));
}

function renderAggregates(runs) {
  const byName = comparable(runs), found = suites(byName);
  $("suite").closest(".row").hidden = !found.length;
  if (!found.length) {
    $("aggregate-charts").replaceChildren(make("p", { class: "note" }, "No two groups with ended runs in the same environments are shown."));
    return;
  }
  const suite = found.find((candidate) => candidate.envs.join(" ") === state.suite) ?? found[0];
  fill($("suite"), found.map(({ envs, names }) => [envs.join(" "), `${envs.slice(0, 4).join(", ")}${envs.length > 4 ? ` and ${envs.length - 4} more` : ""} (${names.length} groups)`]), suite.envs.join(" "));
  const runsOf = (name) => suite.envs.map((env) => byName.get(name).get(env));
  const scoresOf = (name) => runsOf(name).map((group) => group.map(normalised));
  const middle = new Map(suite.names.map((name) => [name, remembered(`iqm ${keyOf(runsOf(name))}`, () => bootstrap(scoresOf(name), iqm))]));
  const names = [...suite.names].sort((a, b) => middle.get(b)[0] - middle.get(a)[0]);
  const base = names.includes(state.base) ? state.base : names[0];
  fill($("base"), names.map((name) => [name, name]), base);
  const labelled = (name) => groupsOf(runs).find((group) => group.name === name).label;
  const row = (name, inks, [point, low, high]) => ({ name, point, low, high, colour: colour(labelled(name), inks) });
  const sizes = unique(names.flatMap((name) => runsOf(name).map((group) => group.length))).sort((a, b) => a - b);
  const span = sizes.length > 1 ? `${sizes[0]} to ${sizes[sizes.length - 1]} runs` : count(sizes[0], "run");
  const iqmPlot = (inks, whole) => intervalPlot({ title: "Interquartile mean", rows: names.map((name) => row(name, inks, middle.get(name))), x: `normalised score (${count(suite.envs.length, "environment")}, ${span} each)` }, inks, whole);
  const better = (name) => remembered(`better ${keyOf(runsOf(name))}>${keyOf(runsOf(base))}`, () => clip(bootstrap([...scoresOf(name), ...scoresOf(base)], improvement)));
  const others = names.filter((name) => name !== base), versus = `Probability of improvement over ${base}`;
  const betterPlot = (inks, whole) => intervalPlot({ title: versus, rows: others.map((name) => row(name, inks, better(name))), range: [0, 1], line: 0.5, x: `P(a run scores higher than one of ${base})` }, inks, whole);
  const taus = Array.from({ length: 101 }, (_, i) => (i / 100) * D.taus);
  const profiles = chart("Performance profiles", (inks) => {
    const series = names.map((name) => {
      const groups = scoresOf(name);
      const triples = remembered(`profile ${keyOf(runsOf(name))}`, () => taus.map((tau) => clip(bootstrap(groups, above(tau), 300))));
      const [y, low, high] = [0, 1, 2].map((i) => triples.map((triple) => triple[i]));
      return { name, colour: colour(labelled(name), inks), dash: dash(labelled(name)), end: D.taus, x: taus, y, low: groups.some((group) => group.length > 1) ? low : [], high };
    });
    return { title: "Performance profiles", series, x: { label: "normalised score τ", range: [0, D.taus] }, y: { range: [-0.02, 1.02], label: "share of runs above τ" } };
  });
  profiles.figure.append(make("p", { class: "warn" }, "Share of runs that score more than τ, mean over environments."));
  $("aggregate-charts").replaceChildren(still("Interquartile mean", iqmPlot), profiles.figure, still(versus, betterPlot));
  profiles.draw();
}

// ----------------------------------------------------------------------------------------------------------- tables

// A table with headings that sort it. A column is [heading, value to sort by, cell, whether it is a number].
function table(node, columns, rows, { key, limit = Infinity, caption, rowClass } = {}) {
  const order = (node.order ??= { column: null, down: false });
  const sorted = order.column === null ? rows : [...rows].sort((a, b) => {
    const [x, y] = [a, b].map(columns[order.column][1]);
    const result = !known(x) ? 1 : !known(y) ? -1 : (typeof x === "number" ? x - y : collate(String(x), String(y))) * (order.down ? -1 : 1);
    return result;
  });
  const head = columns.map(([name, , , number], i) => make("th", { scope: "col", class: number ? "number" : "", "aria-sort": order.column === i ? (order.down ? "descending" : "ascending") : "none" },
    make("button", { type: "button", onclick: () => {
      node.order = { column: i, down: order.column === i ? !order.down : number };
      table(node, columns, rows, { key, limit, caption, rowClass });
      node.querySelectorAll("thead button")[i].focus();
    } }, name, order.column === i ? (order.down ? " ↓" : " ↑") : "")));
  const body = sorted.slice(0, limit).map((row) => make("tr", { class: rowClass?.(row) ?? "" }, columns.map(([, , cell, number]) => make("td", { class: number ? "number" : "" }, cell(row)))));
  node.replaceChildren(make("thead", {}, make("tr", {}, head)), make("tbody", {}, body));
}

const runLink = (run, text = run.id) => make("a", { href: hashOf({ ...state, run: run.id, group: "", video: "" }) }, text);
const groupLink = (group) => make("a", { href: hashOf({ ...state, group: groupKey(group), run: "", video: "" }) }, group.label);
const intervalText = (score) => (known(score.low) ? `[${show(score.low)}, ${show(score.high)}]` : score.n === 1 ? "one run" : "–");

function scoreRows(runs) {
  return groupsOf(runs).map((group) => ({ group, ...scoreOf(group), total: Math.max(...group.runs.map((run) => run.total)), reference: group.runs[0].reference, running: group.runs.filter((run) => !run.ended).length }));
}

function renderScores(runs) {
  const rows = scoreRows(runs);
  const best = new Map();
  for (const row of rows) if (row.n) best.set(row.group.env, Math.max(row.mean, best.get(row.group.env) ?? -Infinity));
  const crowded = (row) => rows.filter((other) => other.group.env === row.group.env && other.n).length > 1;
  table($("score-table"), [
    ["Environment", (row) => row.group.env, (row) => row.group.env],
    ["Group", (row) => row.group.label, (row) => groupLink(row.group)],
    ["Score", (row) => row.mean, (row) => show(row.mean), true],
    ["95 % interval", (row) => row.low, intervalText, true],
    ["Runs", (row) => row.n, (row) => `${row.n}${row.running ? ` (+${row.running} not ended)` : ""}`, true],
    ["Steps", (row) => row.total, (row) => row.total.toLocaleString("en"), true],
    ["Published", (row) => row.reference?.[0], (row) => (row.reference ? `${show(row.reference[0])}${known(row.reference[1]) ? ` ± ${show(row.reference[1])}` : ""}` : "–"), true],
    ["Difference", (row) => (row.reference && known(row.mean) ? row.mean - row.reference[0] : null), (row) => (row.reference && known(row.mean) ? `${row.mean >= row.reference[0] ? "+" : "−"}${show(Math.abs(row.mean - row.reference[0]))}` : "–"), true],
  ], rows, { rowClass: (row) => (row.n && best.get(row.group.env) === row.mean && crowded(row) ? "best" : "") });
}

// The table of scores as lines of cells, for Markdown and CSV.
function scoreCells() {
  const rows = scoreRows(shownRuns()).map((row) => [row.group.env, row.group.label, show(row.mean), intervalText(row), row.n, row.total, row.reference ? row.reference[0] : "", row.reference && known(row.reference[1]) ? row.reference[1] : ""]);
  return [["Environment", "Group", "Score", "95 % interval", "Runs", "Steps", "Published", "± std"], ...rows];
}

function copyMarkdown() {
  const [head, ...rows] = scoreCells(), line = (cells) => `| ${cells.map((cell) => String(cell).replaceAll("|", "\\|")).join(" | ")} |`;
  copy([line(head), line(head.map(() => "---")), ...rows.map(line)].join("\n"), $("copy-md"));
}

function saveCsv() {
  const quote = (cell) => (/[",\n]/.test(cell) ? `"${String(cell).replaceAll('"', '""')}"` : cell);
  download("scores-shown.csv", new Blob([`${scoreCells().map((cells) => cells.map(quote).join(",")).join("\n")}\n`], { type: "text/csv" }));
}

async function copy(text, place) {
  const before = place.textContent;
  try {
    await navigator.clipboard.writeText(text);
  } catch {  // without a secure context, as from some file:// pages
    const area = make("textarea", {});
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  place.textContent = "copied";
  setTimeout(() => { place.textContent = before; }, 1500);
}

let allRows = false;
const statusOf = (run) => (run.ended ? "ended" : `at ${tick(run.last)} of ${tick(run.total)}`);
function renderRuns(runs) {
  const limit = allRows ? Infinity : 100;
  table($("run-table"), [
    ["Run", (run) => run.id, (run) => runLink(run)],
    ["Environment", (run) => run.env, (run) => run.env],
    ["Algorithm", (run) => run.algo, (run) => run.algo],
    ["Seed", (run) => run.seed, (run) => String(run.seed), true],
    ["Score", (run) => run.score, (run) => show(run.score), true],
    ["Steps", (run) => run.last, (run) => run.last.toLocaleString("en"), true],
    ["Time", (run) => run.seconds, (run) => (known(run.seconds) ? duration(run.seconds) : "–"), true],
    ["Commit", (run) => run.commit, (run) => shortCommit(run.commit) || "–"],
    ["State", (run) => statusOf(run), (run) => statusOf(run)],
    ["Videos", (run) => run.videos.length, (run) => (run.videos.length ? String(run.videos.length) : "–"), true],
  ], runs, { limit });
  $("more").hidden = runs.length <= limit;
  $("more").textContent = `Show all ${runs.length}`;
}

// ----------------------------------------------------------------------------------------------- tracing a curve

// The hyperparameters in which runs differ, the seed aside.
function differing(runs) {
  const names = unique(runs.flatMap((run) => Object.keys(run.args)));
  return names.filter((name) => name !== "seed" && unique(runs.map((run) => JSON.stringify(run.args[name]))).length > 1);
}

const valueText = (value) => (value === undefined ? "–" : typeof value === "string" ? value : JSON.stringify(value));

// Hyperparameters of runs, those that differ first; of one run, those that differ from most runs of its algorithm.
function hyperparameters(runs, special, why) {
  const names = unique(runs.flatMap((run) => Object.keys(run.args)));
  const ordered = [...names.filter((name) => special.includes(name)), ...names.filter((name) => !special.includes(name))];
  if (!names.length) return make("p", { class: "note" }, "None recorded.");
  const rows = ordered.map((name) => make("tr", { class: special.includes(name) ? "differs" : "" }, make("td", {}, name), make("td", {}, unique(runs.map((run) => valueText(run.args[name]))).slice(0, 8).join(", "))));
  return make("div", {}, special.length ? make("p", { class: "note" }, why) : null, make("div", { class: "scroll" }, make("table", {}, make("tbody", {}, rows))));
}

function traceChart(title, group, run) {
  const pick = (s) => { if (s.run) change({ run: s.run.id, group: "", video: "" }); };
  return chart(title, (inks) => {
    const all = group.runs.filter((other) => other !== run).map((other) => runSeries(other, group.label, inks)).filter(Boolean);
    let main = null;
    if (run) {
      main = runSeries(run, group.label, inks, false);
      if (main) main.markers = markersOf(run, main);
    } else main = groupSeries(group, inks);
    const series = main ? [...all, main] : all;
    return { title, series, x: xAxis(series), y: { label: metricName(state.metric) }, lines: referenceLines([group], inks), empty: "no values yet" };
  }, pick);
}

function videoPart(run) {
  const chosen = run.videos.find((video) => video[2] === state.video) ?? run.videos[run.videos.length - 1];
  const player = make("video", { controls: true, preload: "metadata", loop: true, playsinline: true, src: chosen[2] });
  player.muted = true;
  const stages = run.videos.map((video) => make("button", { type: "button", "aria-pressed": video === chosen, onclick: (event) => {
    stages.forEach((stage) => stage.setAttribute("aria-pressed", stage === event.currentTarget));
    player.src = video[2];
    player.play();
    state.video = video[2];
    history.replaceState(null, "", hashOf(state));
  } }, `step ${tick(video[0])}`));
  return make("div", {}, make("h3", {}, "The agent at stages of training"), player, make("div", { class: "stages" }, stages));
}

// The facts of a run as a list of terms.
function facts(run) {
  const reference = run.reference ? `${show(run.reference[0])}${known(run.reference[1]) ? ` ± ${show(run.reference[1])}` : ""}` : null;
  const items = [
    ["Score", `${show(run.score)}${run.ended ? "" : " so far"}`], ["Published", reference], ["Seed", String(run.seed)],
    ["Steps", `${run.last.toLocaleString("en")} of ${run.total.toLocaleString("en")}${run.ended ? "" : ", not ended"}`],
    ["Episodes", run.episodes === null ? null : run.episodes.toLocaleString("en")], ["Training", known(run.seconds) ? duration(run.seconds) : null],
    ["Commit", run.commit || null], ["Source", run.source === "record" ? "recorded results" : null],
    ["Folder", run.folder && make("a", { href: run.folder[1] }, run.folder[0])],
  ];
  return make("dl", {}, items.filter(([, value]) => value).flatMap(([term, value]) => [make("dt", {}, term), make("dd", {}, value)]));
}

function traceRun(run) {
  const group = groupsOf(D.runs).find((candidate) => candidate.runs.includes(run));
  const special = unique([...differing(group.runs), ...Object.keys(run.args).filter((name) => name in D.bases[run.algo] && JSON.stringify(D.bases[run.algo][name]) !== JSON.stringify(run.args[name]))]).filter((name) => name in run.args && !["seed", "env_id"].includes(name));
  const here = traceChart(metricName(state.metric), group, run);
  const copyButton = make("button", { type: "button", onclick: () => copy(run.command, copyButton) }, "copy");
  const packages = Object.entries(run.packages).map(([name, version]) => `${name}==${version}`).join("\n");
  return [
    make("p", {}, "Run of ", groupLink(group), `, ${run.env}: `, group.runs.map((other) => [other === run ? make("b", {}, `seed ${other.seed}`) : runLink(other, `seed ${other.seed}`), " "]).slice(0, 40).flat()),
    facts(run), run.videos.length ? videoPart(run) : null, here,
    make("h3", {}, "Command ", run.command ? copyButton : null), make("pre", {}, run.command || "not recorded"),
    make("h3", {}, "Hyperparameters"), hyperparameters([run], special, `First those that differ within the group, or from what most runs of ${run.algo} here have.`),
    make("h3", {}, "Packages"), packages ? make("details", {}, make("summary", {}, count(packages.split("\n").length, "package")), make("pre", {}, packages)) : make("p", { class: "note" }, "Not recorded."),
  ];
}

function traceGroup(group) {
  const score = scoreOf(group), here = traceChart(metricName(state.metric), group), special = differing(group.runs), rows = make("table", {});
  table(rows, [
    ["Run", (run) => run.id, (run) => runLink(run, `seed ${run.seed}`)], ["Score", (run) => run.score, (run) => show(run.score), true],
    ["State", (run) => statusOf(run), statusOf], ["Commit", (run) => run.commit, (run) => shortCommit(run.commit)],
    ...special.slice(0, 3).map((name) => [name, (run) => valueText(run.args[name]), (run) => valueText(run.args[name])]),
  ], group.runs);
  const filmed = group.runs.find((run) => run.videos.length);
  return [
    make("p", {}, `${group.env}: score ${show(score.mean)} ${known(score.low) ? intervalText(score) : ""} over ${count(score.n, "ended run")}.`,
      group.runs.length === 1 ? " One run says nothing of the spread: there is no interval." : ""),
    here, filmed ? videoPart(filmed) : null, make("h3", {}, "Runs"), make("div", { class: "scroll" }, rows),
    make("h3", {}, "Hyperparameters"), hyperparameters(group.runs, special, "First those in which these runs differ."),
    make("h3", {}, "Command"), make("pre", {}, group.runs[0].command || "not recorded"),
  ];
}

let opener = null;
function renderTrace() {
  const panel = $("trace"), run = runById.get(state.run), group = state.group && groupsOf(shownRuns()).concat(groupsOf(D.runs)).find((candidate) => groupKey(candidate) === state.group);
  const open = run || group, was = !panel.hidden;
  panel.hidden = !open && !state.run;
  document.body.classList.toggle("tracing", !panel.hidden);
  if (was === panel.hidden) setTimeout(redraw, 0);  // the charts have more or less room now
  if (panel.hidden) {
    panel.replaceChildren();
    if (was && opener?.isConnected) opener.focus({ preventScroll: true });
    return;
  }
  const close = button("✕", "close", () => change({ run: "", group: "", video: "" }));
  const title = run ? run.id : group ? group.label : state.run;
  const parts = (run ? traceRun(run) : group ? traceGroup(group) : [make("p", {}, "This report has no run of that name.")]).filter(Boolean);
  panel.replaceChildren(make("div", { class: "head" }, make("h2", { id: "trace-h" }, title), close), ...parts.map((part) => part.figure ?? part));
  for (const part of parts) part.draw?.();
  panel.scrollTop = 0;
  if (!was) opener = document.activeElement;
  panel.focus({ preventScroll: true });
}

// --------------------------------------------------------------------------------------------------------- the page

function choices(id, word, values) {
  const box = $(id);
  box.firstElementChild.textContent = state[id].length ? `${word}: ${state[id].length} of ${values.length}` : `${word}: all`;
  if (box.lastElementChild.childElementCount !== values.length) {
    box.lastElementChild.replaceChildren(...values.map((value) => make("label", {}, make("input", { type: "checkbox", value, onchange: () => {
      change({ [id]: [...box.querySelectorAll("input:checked")].map((input) => input.value) });
    } }), value)));
  }
  for (const input of box.querySelectorAll("input")) input.checked = state[id].includes(input.value);
}

const ENVS = unique(D.runs.map((run) => run.env)).sort(collate), ALGOS = unique(D.runs.map((run) => run.algo)).sort(collate);
const VARIED = unique(ALGOS.flatMap((algo) => differing(D.runs.filter((run) => run.algo === algo)))).filter((name) => name !== "env_id").sort(collate);

function renderControls() {
  choices("env", "Environments", ENVS);
  choices("algo", "Algorithms", ALGOS);
  for (const id of ["q", "commit", "by", "metric", "x", "sort", "smooth"]) if (document.activeElement !== $(id) || $(id).type !== "search") $(id).value = state[id];
  for (const id of ["seeds", "refs"]) $(id).checked = state[id];
}

let before = {};
function render() {
  const { run, group, video, ...view } = state, now = JSON.stringify(view), traced = JSON.stringify([run, group, video, now, dark()]);
  if (before.by !== state.by) assignLooks();
  const theme = dark();
  if (before.view !== now || before.theme !== theme) {
    const runs = shownRuns(), missing = renderCurves(runs);
    renderControls();
    renderAggregates(runs);
    renderScores(runs);
    renderRuns(runs);
    const notes = [`${runs.length === D.runs.length ? "All" : `${runs.length.toLocaleString("en")} of`} ${count(D.runs.length, "run")}`];
    if (missing) notes.push(`${count(missing, "run has", "runs have")} no ${state.x === "time" ? "wall times" : "curve"} for ${metricName(state.metric)}`);
    if (state.smooth) notes.push(`each run smoothed over ${2 * state.smooth + 1} of its 200 points`);
    $("shown").textContent = `${notes.join("; ")}.`;
  }
  if (before.traced !== traced) renderTrace();
  for (const item of document.querySelectorAll(".legend button")) item.setAttribute("aria-pressed", item.dataset.key === state.group);
  before = { view: now, by: state.by, traced, theme };
}

// Draw the plots anew at the width that they have now.
function redraw() {
  for (const figure of document.querySelectorAll("figure")) figure.redraw?.();
}

function begin() {
  const wanted = matchMedia("(prefers-color-scheme: dark)");
  const setTheme = (name) => { document.documentElement.dataset.theme = name; };
  setTheme(wanted.matches ? "dark" : "light");
  wanted.addEventListener("change", () => { setTheme(wanted.matches ? "dark" : "light"); render(); });
  $("theme").addEventListener("click", () => { setTheme(dark() ? "light" : "dark"); render(); });
  $("summary").textContent = D.summary;
  $("norm").textContent = D.norm_text;
  $("method-text").replaceChildren(...D.method.map((text) => make("p", {}, text)));
  fill($("commit"), [["", "all"], ...unique(D.runs.map((run) => run.commit)).filter(Boolean).sort().map((commit) => [commit, shortCommit(commit)])], "");
  fill($("by"), [["algorithm", "algorithm"], ["commit", "commit"], ...VARIED.map((name) => [name, name])], "algorithm");
  fill($("metric"), D.metrics.map((tag) => [tag, metricName(tag)]), D.metrics[0]);
  for (const id of ["commit", "by", "metric", "x", "sort", "suite", "base"]) $(id).addEventListener("change", (event) => change({ [id]: event.target.value }));
  $("q").addEventListener("input", (event) => change({ q: event.target.value }));
  $("smooth").addEventListener("input", (event) => change({ smooth: Number(event.target.value) }));
  for (const id of ["seeds", "refs"]) $(id).addEventListener("change", (event) => change({ [id]: event.target.checked }));
  $("clear").addEventListener("click", () => { $("q").value = ""; change({ ...FRESH, run: state.run, group: state.group, video: state.video }); });
  $("controls").addEventListener("submit", (event) => event.preventDefault());
  $("copy-md").addEventListener("click", copyMarkdown);
  $("save-csv").addEventListener("click", saveCsv);
  $("more").addEventListener("click", () => { allRows = true; renderRuns(shownRuns()); });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape" && !$("trace").hidden) change({ run: "", group: "", video: "" }); });
  document.addEventListener("click", (event) => { for (const box of document.querySelectorAll(".choice[open]")) if (!box.contains(event.target)) box.open = false; });
  for (const event of ["popstate", "hashchange"]) window.addEventListener(event, () => { readHash(); render(); });
  let resizing = null;
  window.addEventListener("resize", () => { clearTimeout(resizing); resizing = setTimeout(redraw, 150); });
  readHash();
  render();
}

begin();
