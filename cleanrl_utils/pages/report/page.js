// The report: which runs are shown and how they are grouped, the sections of the page, and the trace of a curve.
//
// What is shown is one object, `state`, which is also the part of the address after #. Every control changes it through
// change(), and render() draws the page from it.

const $ = (id) => document.getElementById(id);
const count = (n, word, words = `${word}s`) => `${n.toLocaleString("en")} ${n === 1 ? word : words}`;
const shortCommit = (commit) => commit.split(" ").map((hash) => hash.slice(0, 7)).join("+");
const metricName = (tag) => (tag === "charts/episodic_return" ? "Episodic return" : tag);

// The order of names, with numbers in them by size: v9 before v10, lr=0.00025 before lr=1e-3.
function collate(a, b) {
  const [x, y] = [a, b].map((text) => text.toLowerCase().split(/(\d+(?:\.\d+)?(?:e[+-]?\d+)?)/));
  for (let i = 0; i < Math.min(x.length, y.length); i++) {
    if (x[i] !== y[i]) return (i % 2 && Number(x[i]) - Number(y[i])) || (x[i] < y[i] ? -1 : 1);
  }
  return x.length - y.length || (a < b ? -1 : a > b ? 1 : 0);
}

// ------------------------------------------------------------------------------------- what is shown: state and runs

D.runs.forEach((run, index) => {
  run.index = index;
  run.args = { ...D.bases[run.algo], ...run.args };
  run.packages = D.packages[run.packages];
  run.text = `${run.id} ${run.env} ${run.algo} ${run.commit} ${run.command}`.toLowerCase();
});
const runById = new Map(D.runs.map((run) => [run.id, run]));

// Flags that say nothing about learning, or have a place of their own in the page.
const ASIDE = new Set(D.aside);

// The hyperparameters in which runs differ. A record has the flags of its command only: one that it lacks may differ.
const valuesOf = (runs, name) => unique(runs.map((run) => JSON.stringify(run.args[name])));
function differing(runs) {
  const names = unique(runs.flatMap((run) => Object.keys(run.args))).filter((name) => !ASIDE.has(name));
  return names.filter((name) => valuesOf(runs, name).length > 1);
}

const commitsOf = (runs) => unique(runs.flatMap((run) => (shortCommit(run.commit) || "?").split("+")));
const differences = (runs) => [...differing(runs), ...(commitsOf(runs).length > 1 ? ["commit"] : [])];

const ENVS = unique(D.runs.map((run) => run.env)).sort(collate);
const ALGOS = unique(D.runs.map((run) => run.algo)).sort(collate);
const COMMITS = unique(D.runs.map((run) => run.commit)).filter(Boolean).sort();
const VARIED = unique(ALGOS.flatMap((algo) => {
  const runs = D.runs.filter((run) => run.algo === algo);
  return differing(runs).filter((name) => valuesOf(runs, name).filter(known).length > 1);
})).sort(collate);

// The words that a part of the state may be.
const CHOICES = {
  env: ENVS, algo: ALGOS, commit: ["", ...COMMITS], by: ["algorithm", "commit", ...VARIED], metric: D.metrics,
  x: ["steps", "time"], sort: ["name", "score", "runs"],
};

const FRESH = {
  q: "", env: [], algo: [], commit: "", by: "algorithm", metric: D.metrics[0], x: "steps", sort: "name",
  smooth: D.smooth, seeds: false, refs: false, suite: "", base: "", run: "", group: "", video: "",
};
let state = { ...FRESH };

// The part of the address after #: what differs from the fresh page, so that a view can be sent to somebody.
function hashOf(view) {
  const words = new URLSearchParams();
  for (const [key, fresh] of Object.entries(FRESH)) {
    for (const value of [view[key]].flat()) {
      if (String(value) !== String(fresh)) words.append(key, value === true ? 1 : value);
    }
  }
  return `#${words}`;
}

function readHash() {
  const words = new URLSearchParams(location.hash.slice(1)), view = { ...FRESH };
  if (location.hash && ![...words.keys()].some((key) => key in FRESH)) return;  // a link to a part of the page
  for (const [key, fresh] of Object.entries(FRESH)) {
    if (!words.has(key)) continue;
    const value = words.get(key), may = (word) => CHOICES[key]?.includes(word) ?? true;
    if (Array.isArray(fresh)) view[key] = words.getAll(key).filter(may);
    else if (!may(value)) continue;
    else if (typeof fresh === "boolean") view[key] = value === "1";
    else view[key] = typeof fresh === "number" ? Number(value) || 0 : value;
  }
  view.smooth = Math.min(20, Math.max(0, Math.round(view.smooth)));
  state = view;
}

// Change what is shown. Tracing a run is a step of the browser's history, turning a knob is not.
function change(part) {
  state = { ...state, ...part };
  history["run" in part || "group" in part ? "pushState" : "replaceState"](null, "", hashOf(state));
  render();
}

const TRACE_NOTHING = { run: "", group: "", video: "" };
const traceOfRun = (run, video = "") => ({ run: run.id, group: "", video });
const traceOfGroup = (group) => ({ run: "", group: groupKey(group), video: "" });

// One word of a search: learning_rate=0.001, seed<3, gamma!=0.99, or any part of a run's name, command or commit.
function matches(run, word) {
  const found = /^([\w.-]+?)(!=|<=|>=|=|<|>)(.*)$/.exec(word);
  if (!found) return run.text.includes(word.toLowerCase());
  const [, name, sign, wanted] = found, key = name.replaceAll("-", "_").replace(/^_+/, "");
  const { seed, commit, env, algo, score } = run;
  const value = { seed, commit, env, env_id: env, algo, algorithm: algo, exp_name: algo, score }[key] ?? run.args[key];
  if (!known(value)) return false;
  const [a, b] = [value, wanted].map(Number);
  const numbers = wanted !== "" && typeof value !== "boolean" && known(a) && known(b);
  if (numbers) return { "=": a === b, "!=": a !== b, "<": a < b, ">": a > b, "<=": a <= b, ">=": a >= b }[sign];
  const [has, looked] = [value, wanted].map((text) => String(text).toLowerCase());
  const equal = key === "commit" ? has.startsWith(looked) : has === looked;
  return sign === "=" ? equal : sign === "!=" ? !equal : false;
}

function shownRuns() {
  const words = state.q.split(/\s+/).filter(Boolean);
  const ticked = (chosen, value) => !chosen.length || chosen.includes(value);
  return D.runs.filter((run) =>
    ticked(state.env, run.env) && ticked(state.algo, run.algo) && (!state.commit || run.commit === state.commit) &&
    words.every((word) => matches(run, word)));
}

// ------------------------------------------------------------------------------------------------------------ groups

// What a run is grouped under. Runs of one algorithm and environment with different numbers of steps are kept apart. By
// algorithm so are, in the name that Python gives, settings and commits that share seeds.
function nameOf(run) {
  if (state.by === "algorithm") return run.name;
  if (state.by === "commit") return `${run.algo} @ ${shortCommit(run.commit) || "?"}`;
  return `${run.algo} · ${state.by}=${run.args[state.by] ?? "–"}`;
}

const labelOf = (run) => nameOf(run) + (run.budget ? ` · ${tick(run.total)} steps` : "");
const groupKey = (group) => `${group.env}|${group.label}`;

// The groups of some runs, [{env, label, name, runs}], by environment and label.
function groupsOf(runs) {
  const groups = new Map();
  for (const run of runs) {
    const label = labelOf(run), key = `${run.env}|${label}`;
    if (!groups.has(key)) groups.set(key, { env: run.env, label, name: nameOf(run), runs: [] });
    groups.get(key).runs.push(run);
  }
  return [...groups.values()].sort((a, b) => collate(a.env, b.env) || collate(a.label, b.label));
}

const ended = (runs) => runs.filter((run) => run.ended && known(run.score));

// The scores of a group's runs that have ended: their number, mean and interval.
function scoreOf(group) {
  const runs = ended(group.runs), scores = runs.map((run) => run.score), key = `score ${runs.map((run) => run.index)}`;
  if (!scores.length) return { n: 0, mean: null, low: null, high: null };
  const compute = () => within(bootstrap([scores], (groups) => mean(groups[0])), D.seen[D.metrics[0]][group.env]);
  const [middle, low, high] = remembered(key, compute);
  return { n: scores.length, mean: middle, low, high };
}

// Each label gets the first colour (then dash) that no label in one of its environments has: neighbours differ.
let looks = new Map();
function assignLooks() {
  looks = new Map();
  const labels = new Map(), neighbours = new Map();
  for (const { env, label } of groupsOf(D.runs)) {
    labels.set(label, [...(labels.get(label) ?? []), env]);
    neighbours.set(env, [...(neighbours.get(env) ?? []), label]);
  }
  const most = COLOURS.light.length * DASHES.length - 1;
  const order = [...labels].sort((a, b) => b[1].length - a[1].length || collate(a[0], b[0]));
  for (const [label, envs] of order) {
    const taken = new Set(envs.flatMap((env) => neighbours.get(env)).map((other) => looks.get(other)));
    let look = 0;
    while (taken.has(look) && look < most) look++;
    looks.set(label, look);
  }
}

const colour = (label, inks = theme()) => inks.colours[(looks.get(label) ?? 0) % inks.colours.length];
const dash = (label) => DASHES[Math.floor((looks.get(label) ?? 0) / COLOURS.light.length)];

function swatch(label) {
  const look = { stroke: colour(label), "stroke-width": 3, "stroke-dasharray": dash(label) };
  const line = make("line", { x1: 0, x2: 26, y1: 6, y2: 6, ...look });
  return make("svg", { class: "swatch", viewBox: "0 0 26 12", "aria-hidden": "true" }, line);
}

// --------------------------------------------------------------------------------------------------- learning curves

function xAxis(series) {
  if (state.x === "steps") {
    return { label: "environment steps", say: (step) => `step ${Math.round(step).toLocaleString("en")}` };
  }
  const [name, unit] = timeUnit(Math.max(...series.map((s) => s.end), 1));
  return { label: `${name} of training`, unit, say: duration };
}

// Where a run's videos lie on a curve: those before its first point at that, those after its last nowhere.
function markersOf(run, curve) {
  const markers = [], first = curve.y.findIndex(known);
  for (const [step, seconds, path] of run.videos) {
    const x = state.x === "steps" ? step : seconds;
    if (!known(x) || first < 0) continue;
    const i = x < curve.x[first] ? first : indexAt(curve, x);
    const text = `video at step ${step.toLocaleString("en")}, seed ${run.seed}`;
    if (i !== null) markers.push({ x, y: curve.y[i], text, pick: () => change(traceOfRun(run, path)) });
  }
  return markers;
}

function runSeries(run, label, inks, faint = true) {
  const curve = runCurve(run, state);
  return curve && { name: `seed ${run.seed}`, colour: colour(label, inks), dash: "", faint, run, ...curve };
}

function groupSeries(group, inks) {
  const curve = groupCurve(group.runs, state);
  if (!curve) return null;
  const filmed = group.runs.find((run) => run.videos.length);
  const look = { name: group.label, colour: colour(group.label, inks), dash: dash(group.label) };
  return { ...look, group, ...curve, markers: filmed ? markersOf(filmed, curve) : [] };
}

// The published scores of the scripts in some groups, as lines.
function referenceLines(groups, inks) {
  if (state.metric !== D.metrics[0]) return [];
  return groups.filter((group) => group.runs[0].reference).map(({ label, runs }) =>
    ({ y: runs[0].reference[0], colour: colour(label, inks), name: label }));
}

function curvesSpec(title, series, lines, describe) {
  const empty = state.x === "time" ? "no wall times recorded" : "no values yet";
  return { title, series, lines, empty, describe, x: xAxis(series), y: { label: metricName(state.metric) } };
}

function envSpec(title, groups) {
  return (inks) => {
    const means = groups.map((group) => groupSeries(group, inks)).filter(Boolean);
    const runsOf = (group) => group.runs.map((run) => runSeries(run, group.label, inks)).filter(Boolean);
    const runs = state.seeds ? groups.flatMap(runsOf) : [];
    const lines = state.refs ? referenceLines(groups, inks) : [];
    return curvesSpec(title, [...runs, ...means], lines, describe(title, groups));
  };
}

// A plot in words.
function describe(title, groups) {
  const runs = (group) => count(group.runs.length, "run");
  const parts = groups.map((group) => `${group.label} ${show(scoreOf(group).mean)} (${runs(group)})`);
  return `${metricName(state.metric)} in ${title}. Scores: ${parts.join(", ")}.`;
}

function legend(groups) {
  return make("div", { class: "legend" }, groups.map((group) => {
    const score = scoreOf(group), going = group.runs.filter((run) => !run.ended).length;
    const notes = [score.n ? show(score.mean) : "", count(group.runs.length, "run"), going ? `${going} not ended` : ""];
    const pressed = String(state.group === groupKey(group));
    const trace = { onclick: () => change(traceOfGroup(group)), title: "trace to its runs" };
    const about = { type: "button", "data-key": groupKey(group), "aria-pressed": pressed };
    const words = make("small", {}, notes.filter(Boolean).join(", "));
    return make("button", { ...about, ...trace }, swatch(group.label), group.label, " ", words, unlike(group));
  }));
}

// The sign of a group whose runs are not of one kind.
function unlike({ runs }) {
  const names = differences(runs);
  return names.length ? make("small", { title: `its runs differ in ${names.join(", ")}` }, " ≠") : null;
}

// What to keep in mind about the curves of a chart.
function warnings(groups) {
  const few = groups.filter((group) => group.runs.length < 3), texts = [];
  const share = few.length < groups.length ? ` (${few.length} of ${groups.length} curves)` : "";
  if (few.length) texts.push(`One or two runs have no interval${share}.`);
  const mixed = groups.filter((group) => commitsOf(group.runs).length > 1).map((group) => group.label);
  if (mixed.length) texts.push(`Runs of several commits are in one curve: ${mixed.join(", ")}.`);
  const unnamed = state.by === "algorithm" && groups.length ? D.unnamed[groups[0].env] ?? {} : {};
  for (const [algo, flags] of Object.entries(unnamed)) {
    const shown = groups.filter((group) => group.runs[0].algo === algo);
    if (shown.length > 1) texts.push(`Curves of ${shown[0].runs[0].name} also differ in ${flags.join(", ")}.`);
  }
  return texts.map((text) => make("p", { class: "warn" }, text));
}

// Charts are drawn when they come near the screen: a report may have hundreds.
const watcher = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (!entry.isIntersecting) continue;
    watcher.unobserve(entry.target);
    draw(entry.target);
  }
}, { rootMargin: "400px" });

// A chart that cannot be drawn says so, and leaves the others alone.
function draw(figure) {
  try {
    figure.begin();
  } catch (error) {
    console.error(error);
    figure.append(make("p", { class: "warn" }, `This chart could not be drawn: ${error.message}`));
  }
}

function envFigure(env, groups) {
  const pick = (s) => change(s.run ? traceOfRun(s.run) : traceOfGroup(s.group));
  const here = chart(env, `${env} ${state.x} ${state.metric}`, envSpec(env, groups), pick);
  here.holder.classList.add("placeholder");
  here.figure.begin = () => {
    here.holder.classList.remove("placeholder");
    here.draw();
    here.figure.append(legend(groups), ...warnings(groups));
  };
  return here.figure;
}

function renderCurves(runs) {
  watcher.disconnect();
  const inEnv = new Map();
  for (const group of groupsOf(runs)) inEnv.set(group.env, [...(inEnv.get(group.env) ?? []), group]);
  const best = ([, groups]) => Math.max(...groups.map((group) => scoreOf(group).mean ?? -Infinity));
  const size = ([, groups]) => sum(groups.map((group) => group.runs.length));
  const rank = { score: best, runs: size }[state.sort], entries = [...inEnv];
  if (rank) entries.sort((a, b) => rank(b) - rank(a) || collate(a[0], b[0]));
  const figures = entries.map(([env, groups]) => envFigure(env, groups));
  $("charts").replaceChildren(...figures);
  const places = figures.map((figure) => figure.getBoundingClientRect());
  figures.forEach((figure, i) => {
    if (places[i].bottom > -100 && places[i].top < innerHeight + 100) draw(figure);
    else watcher.observe(figure);
  });
}

// -------------------------------------------------------------------------------------------------------- aggregates

const PARTS = 50;  // points of the course of the interquartile mean

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

// The sets of environments in which two or more groups can be compared, those with most results first.
function suitesOf(byName) {
  const sets = new Map();
  for (const envs of byName.values()) {
    const names = [...envs.keys()].sort(collate);
    sets.set(names.join(" "), names);
  }
  const suites = [...sets].map(([key, envs]) => {
    const names = [...byName.keys()].filter((name) => envs.every((env) => byName.get(name).has(env)));
    return { key, envs, names, size: envs.length * names.length };
  });
  return suites.filter((suite) => suite.names.length > 1).sort((a, b) => b.size - a.size || collate(a.key, b.key));
}

function normalised(run, value) {
  const [low, high] = D.norm[run.env];
  return (value - low) / (high - low);
}

// The range of normalised returns in some environments.
function normalRange(envs) {
  const ends = envs.map((env) => D.seen[D.metrics[0]][env].map((value) => normalised({ env }, value)));
  return [Math.min(...ends.map(([low]) => low)), Math.max(...ends.map(([, high]) => high))];
}

// The normalised returns of a run at equal parts of its training, or null without a curve.
function courseOf(run) {
  const curve = runCurve(run, { metric: D.metrics[0], x: "steps", smooth: state.smooth });
  if (!curve) return null;
  const places = centres(curve.end, PARTS), first = curve.y.find(known), last = curve.y.findLast(known);
  const start = curve.x[curve.y.findIndex(known)];
  return interpolate(curve.x, curve.y, places).map((y, i) => normalised(run, y ?? (places[i] < start ? first : last)));
}

function fill(select, options, value) {
  const option = ([key, text]) => make("option", { value: key, selected: key === value }, text);
  select.replaceChildren(...options.map(option));
}

function renderAggregates(runs) {
  const byName = comparable(runs), suites = suitesOf(byName), place = $("aggregate-charts");
  $("suite").closest(".row").hidden = !suites.length;
  $("budgets").hidden = true;
  if (!suites.length) {
    const text = "No two groups with ended runs in the same environments are shown.";
    place.replaceChildren(make("p", { class: "note" }, text));
    return;
  }
  const suite = suites.find((candidate) => candidate.key === state.suite) ?? suites[0];
  const labels = new Map(groupsOf(runs).map((group) => [group.name, group.label]));
  const entries = suite.names.map((name) => {
    const groups = suite.envs.map((env) => byName.get(name).get(env));
    const key = groups.map((group) => group.map((run) => run.index)).join(";");
    const scores = groups.map((group) => group.map((run) => normalised(run, run.score)));
    const span = normalRange(suite.envs), middle = remembered(`iqm ${key}`, () => within(bootstrap(scores, iqm), span));
    return { name, shown: name, key, groups, scores, span, label: labels.get(name), iqm: middle };
  });
  nameBudgets(entries);
  entries.sort((a, b) => b.iqm[0] - a.iqm[0]);
  const base = entries.find((entry) => entry.name === state.base) ?? entries[0];
  const brief = (envs) => envs.slice(0, 4).join(", ") + (envs.length > 4 ? ` and ${envs.length - 4} more` : "");
  fill($("suite"), suites.map((s) => [s.key, `${brief(s.envs)} (${s.names.length} groups)`]), suite.key);
  fill($("base"), entries.map(({ name }) => [name, name]), base.name);
  const charts = [courseChart(entries, suite.key), profileChart(entries, suite.key)];
  const [courses, profiles] = charts.map((one) => one.figure);
  const rows = make("div", { class: "column" }, iqmFigure(entries, suite.envs), improvementFigure(entries, base));
  place.replaceChildren(rows, courses, profiles);
  for (const one of charts) one.draw();
}

// Groups that have trained for other numbers of steps in an environment are named with these, and a warning.
function nameBudgets(entries) {
  const totals = ({ groups }) => groups.map(([run]) => run.total);
  if (unique(entries.map((entry) => String(totals(entry)))).length === 1) return;
  for (const entry of entries) {
    const [least, most] = [Math.min, Math.max].map((end) => tick(Number(end(...totals(entry)).toPrecision(3))));
    entry.shown += ` (${least === most ? least : `${least}–${most}`})`;
  }
  const names = entries.map((entry) => entry.shown).join(", ");
  $("budgets").hidden = false;
  $("budgets").textContent = `Not after the same number of steps: ${names}. A higher score may come from more steps alone.`;
}

const intervalRow = ({ shown, label }, inks, [point, low, high]) =>
  ({ name: shown, point, low, high, colour: colour(label, inks) });

function iqmFigure(entries, envs) {
  const sizes = unique(entries.flatMap(({ scores }) => scores.map((group) => group.length))).sort((a, b) => a - b);
  const runs = sizes.length > 1 ? `${sizes[0]} to ${sizes[sizes.length - 1]} runs` : count(sizes[0], "run");
  const title = "Interquartile mean", x = `normalised score (${count(envs.length, "environment")}, ${runs} each)`;
  return still(title, (inks, whole) =>
    intervalPlot({ title, x, rows: entries.map((entry) => intervalRow(entry, inks, entry.iqm)) }, inks, whole));
}

// The interquartile mean of the returns in the course of training.
function courseChart(entries, key) {
  const title = "Interquartile mean over training", x = centres(100, PARTS);
  const triplesOf = (entry) => remembered(`course ${state.smooth} ${entry.key}`, () => {
    const courses = entry.groups.map((group) => group.map(courseOf).filter(Boolean));
    if (!courses.every((group) => group.length)) return null;
    const iqmAt = (i) => (groups) => iqm(groups.map((group) => group.map((course) => course[i])));
    return bootstraps(courses, x.map((_, i) => iqmAt(i)), 300).map((triple) => within(triple, entry.span));
  });
  return chart(title, `courses ${key}`, (inks) => {
    const series = entries.filter(triplesOf).map((entry) => {
      const [y, low, high] = [0, 1, 2].map((i) => triplesOf(entry).map((triple) => triple[i]));
      const look = { name: entry.shown, colour: colour(entry.label, inks), dash: dash(entry.label) };
      return { ...look, x, y, low, high, end: 100 };
    });
    const axis = { label: "% of the steps of training", range: [0, 100], say: (part) => `${show(part)} % of training` };
    return { title, series, x: axis, y: { label: "normalised return" }, empty: "no curves recorded" };
  });
}

function profileChart(entries, key) {
  const taus = Array.from({ length: 101 }, (_, i) => (i / 100) * D.taus), title = "Performance profiles";
  const profileOf = (entry) => remembered(`profile ${entry.key}`, () =>
    bootstraps(entry.scores, taus.map(above), 1000).map((triple) => share(triple, entry.scores.flat().length)));
  return chart(title, `profiles ${key}`, (inks) => {
    const series = entries.map((entry) => {
      const [y, low, high] = [0, 1, 2].map((i) => profileOf(entry).map((triple) => triple[i]));
      const look = { name: entry.shown, colour: colour(entry.label, inks), dash: dash(entry.label) };
      return { ...look, x: taus, y, low, high, end: D.taus };
    });
    const x = { label: "normalised score τ", range: [0, D.taus], say: (tau) => `τ = ${show(tau)}` };
    return { title, series, x, y: { range: [-0.02, 1.02], label: "share of runs that score more than τ" } };
  });
}

function improvementFigure(entries, base) {
  const title = `Probability of improvement over ${base.name}`, x = `P(a run scores more than one of ${base.name})`;
  const trials = (entry) => sum(entry.scores.map((scores, i) => trialsOf(scores, base.scores[i])));
  const better = (entry) => remembered(`better ${entry.key}>${base.key}`, () =>
    share(bootstrap([...entry.scores, ...base.scores], improvement), trials(entry)));
  return still(title, (inks, whole) => {
    const rows = entries.filter((entry) => entry !== base).map((entry) => intervalRow(entry, inks, better(entry)));
    return intervalPlot({ title, x, rows, range: [0, 1], line: 0.5 }, inks, whole);
  });
}

// ------------------------------------------------------------------------------------------------------------ tables

// A table with headings that sort it. A column is [heading, value to sort by, cell, whether it is a number].
function table(node, columns, rows, { limit = Infinity, rowClass = () => "" } = {}) {
  const order = (node.order ??= { column: null, down: false });
  const compare = (a, b) => {
    const [x, y] = [a, b].map(columns[order.column][1]);
    if (!known(x) || !known(y)) return known(y) - known(x);
    return (typeof x === "number" ? x - y : collate(x, y)) * (order.down ? -1 : 1);
  };
  const sorted = order.column === null ? rows : [...rows].sort(compare);
  const sortBy = (i) => {
    node.order = { column: i, down: order.column === i ? !order.down : Boolean(columns[i][3]) };
    table(node, columns, rows, { limit, rowClass });
    node.querySelectorAll("thead button")[i].focus();
  };
  const head = columns.map(([name, , , number], i) => {
    const own = order.column === i, sort = own ? (order.down ? "descending" : "ascending") : "none";
    const arrow = own ? (order.down ? " ↓" : " ↑") : "";
    const heading = make("button", { type: "button", onclick: () => sortBy(i) }, name, arrow);
    return make("th", { scope: "col", class: number ? "number" : "", "aria-sort": sort }, heading);
  });
  const cells = (row) => columns.map(([, , cell, number]) => make("td", { class: number ? "number" : "" }, cell(row)));
  const body = sorted.slice(0, limit).map((row) => make("tr", { class: rowClass(row) }, cells(row)));
  node.replaceChildren(make("thead", {}, make("tr", {}, head)), make("tbody", {}, body));
}

const linkTo = (trace, text) => make("a", { href: hashOf({ ...state, ...trace }) }, text);
const runLink = (run, text = run.id) => linkTo(traceOfRun(run), text);
const groupLink = (group) => linkTo(traceOfGroup(group), group.label);
const statusOf = (run) => (run.ended ? "ended" : `at ${tick(run.last)} of ${tick(run.total)}`);

function intervalText({ n, low, high }) {
  return known(low) ? `[${show(low)}, ${show(high)}]` : ["–", "one run", "two runs"][n] ?? "–";
}

function referenceText(reference) {
  if (!reference) return "–";
  const [middle, deviation] = reference;
  return show(middle) + (known(deviation) ? ` ± ${show(deviation)}` : "");
}

function scoreRows(runs) {
  return groupsOf(runs).map((group) => {
    const score = scoreOf(group), { reference, total } = group.runs[0];
    const difference = reference && known(score.mean) ? score.mean - reference[0] : null;
    return { group, ...score, total, reference, difference, going: group.runs.length - score.n };
  });
}

function renderScores(runs) {
  const rows = scoreRows(runs), best = new Map(), rivals = new Map();
  for (const { n, mean, group: { env } } of rows) {
    if (!n) continue;
    best.set(env, Math.max(mean, best.get(env) ?? -Infinity));
    rivals.set(env, (rivals.get(env) ?? 0) + 1);
  }
  const isBest = ({ n, mean, group: { env } }) => n && rivals.get(env) > 1 && mean === best.get(env);
  const signed = (value) => (known(value) ? `${value < 0 ? "−" : "+"}${show(Math.abs(value))}` : "–");
  table($("score-table"), [
    ["Environment", (row) => row.group.env, (row) => row.group.env],
    ["Group", (row) => row.group.label, (row) => [groupLink(row.group), unlike(row.group)]],
    ["Score", (row) => row.mean, (row) => show(row.mean), true],
    ["95 % interval", (row) => row.low, intervalText, true],
    ["Runs", (row) => row.n, (row) => `${row.n}${row.going ? ` (+${row.going} without a score)` : ""}`, true],
    ["Steps", (row) => row.total, (row) => row.total.toLocaleString("en"), true],
    ["Published", (row) => row.reference?.[0], (row) => referenceText(row.reference), true],
    ["Difference", (row) => row.difference, (row) => signed(row.difference), true],
  ], rows, { rowClass: (row) => (isBest(row) ? "best" : "") });
}

function copyMarkdown() {
  const head = ["Environment", "Group", "Score", "95 % interval", "Runs", "Steps", "Published"];
  const rows = scoreRows(shownRuns()).map((row) => {
    const { group: { env, label }, n, total, reference } = row;
    return [env, label, show(row.mean), intervalText(row), n, total, referenceText(reference)];
  });
  const line = (cells) => `| ${cells.map((cell) => String(cell).replaceAll("|", "\\|")).join(" | ")} |`;
  copy([line(head), line(head.map(() => "---")), ...rows.map(line)].join("\n"), $("copy-md"));
}

function saveCsv() {
  const head = ["env_id", "group", "steps", "runs", "score", "low", "high", "reference", "reference_std"];
  const rows = scoreRows(shownRuns()).map(({ group: { env, label }, total, n, mean, low, high, reference }) =>
    [env, label, total, n, mean, low, high, ...(reference ?? [null, null])]);
  const quote = (cell) => (/[",\n]/.test(cell) ? `"${String(cell).replaceAll('"', '""')}"` : known(cell) ? cell : "");
  const lines = [head, ...rows].map((cells) => cells.map(quote).join(","));
  download("scores-shown.csv", new Blob([`${lines.join("\n")}\n`], { type: "text/csv" }));
}

async function copy(text, place) {
  const before = place.textContent;
  try {
    await navigator.clipboard.writeText(text);
  } catch {  // some browsers have no clipboard for a page from the disk
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
    ["State", statusOf, statusOf],
    ["Videos", (run) => run.videos.length, (run) => (run.videos.length ? String(run.videos.length) : "–"), true],
  ], runs, { limit });
  $("more").hidden = runs.length <= limit;
  $("more").textContent = `Show all ${runs.length}`;
}

// --------------------------------------------------------------------------------------------------- tracing a curve

const valueText = (value) => (value === undefined ? "–" : typeof value === "string" ? value : JSON.stringify(value));

// The hyperparameters in which runs of an algorithm and environment differ, in whatever group they are.
const differingFrom = ({ algo, env }) => differing(D.runs.filter((run) => run.algo === algo && run.env === env));

// The hyperparameters of runs, with the special ones first, and why these are special.
function hyperparameters(runs, special, why) {
  const names = unique([...special, ...runs.flatMap((run) => Object.keys(run.args))]);
  if (!names.length) return make("p", { class: "note" }, "None recorded.");
  const rows = names.map((name) => {
    const values = unique(runs.map((run) => valueText(run.args[name])));
    const text = values.slice(0, 8).join(", ") + (values.length > 8 ? ` and ${values.length - 8} more` : "");
    return make("tr", { class: special.includes(name) ? "differs" : "" }, make("td", {}, name), make("td", {}, text));
  });
  const list = make("div", { class: "scroll" }, make("table", {}, make("tbody", {}, rows)));
  return make("div", {}, special.length ? make("p", { class: "note" }, why) : null, list);
}

// A group's runs one by one, faint, with their mean or with one of them in front.
function traceChart(title, group, run) {
  const others = group.runs.filter((other) => other !== run);
  const front = (inks) => {
    if (!run) return groupSeries(group, inks);
    const series = runSeries(run, group.label, inks, false);
    return series && { ...series, markers: markersOf(run, series) };
  };
  return chart(title, `trace ${groupKey(group)} ${run?.id} ${state.x} ${state.metric}`, (inks) => {
    const series = [...others.map((other) => runSeries(other, group.label, inks)), front(inks)].filter(Boolean);
    return curvesSpec(title, series, referenceLines([group], inks));
  }, (s) => { if (s.run && s.run !== run) change(traceOfRun(s.run)); });
}

function videoPart(run) {
  const chosen = run.videos.find((video) => video[2] === state.video) ?? run.videos[run.videos.length - 1];
  const player = make("video", { controls: true, preload: "metadata", loop: true, playsinline: true, src: chosen[2] });
  player.muted = true;
  const stages = run.videos.map((video) => {
    const text = `step ${tick(Number(video[0].toPrecision(3)))}`, pressed = String(video === chosen);
    return make("button", { type: "button", "aria-pressed": pressed, onclick: (event) => {
      for (const stage of stages) stage.setAttribute("aria-pressed", stage === event.currentTarget);
      player.src = video[2];
      player.play();
      state.video = video[2];
      history.replaceState(null, "", hashOf(state));
    } }, text);
  });
  const title = make("h3", {}, `The agent at stages of training, seed ${run.seed}`);
  return make("div", {}, title, player, make("div", { class: "stages" }, stages));
}

// The facts of a run as a list of terms.
function facts(run) {
  const { last, total, episodes, seconds, commit, folder } = run, number = (n) => n.toLocaleString("en");
  const items = [
    ["Score", `${show(run.score)}${run.ended ? "" : " so far"}`],
    ["Published", run.reference && referenceText(run.reference)],
    ["Seed", String(run.seed)],
    ["Steps", `${number(last)} of ${number(total)}${run.ended ? "" : ", not ended"}`],
    ["Episodes", known(episodes) && number(episodes)],
    ["Training", known(seconds) && duration(seconds)],
    ["Commit", commit],
    ["Source", run.source === "record" && "recorded results"],
    ["Folder", folder && make("a", { href: folder[1] }, folder[0])],
  ];
  const there = items.filter(([, value]) => value);
  return make("dl", {}, there.flatMap(([term, value]) => [make("dt", {}, term), make("dd", {}, value)]));
}

function traceRun(run) {
  const group = groupsOf(D.runs).find((candidate) => candidate.runs.includes(run)), usual = D.bases[run.algo];
  const unusual = Object.keys(usual).filter((name) => JSON.stringify(usual[name]) !== JSON.stringify(run.args[name]));
  const special = unique([...differingFrom(run), ...unusual]).filter((name) => !["seed", "env_id"].includes(name));
  const seeds = group.runs.slice(0, 40).flatMap((other) => {
    const text = `seed ${other.seed}`;
    return [other === run ? make("b", {}, text) : runLink(other, text), " "];
  });
  const packages = Object.entries(run.packages).map(([name, version]) => `${name}==${version}`);
  const copyButton = make("button", { type: "button", onclick: () => copy(run.command, copyButton) }, "copy");
  const why = `First those in which runs of ${run.algo} in this environment differ, or in which this one is unusual.`;
  return [
    make("p", {}, "Run of ", groupLink(group), ` in ${run.env}: `, seeds), facts(run),
    run.videos.length ? videoPart(run) : null, traceChart(`${run.env}, ${group.label}, seed ${run.seed}`, group, run),
    make("h3", {}, "Command ", run.command ? copyButton : null), make("pre", {}, run.command || "not recorded"),
    make("h3", {}, "Hyperparameters"), hyperparameters([run], special, why),
    make("h3", {}, "Packages"),
    make("details", {}, make("summary", {}, count(packages.length, "package")), make("pre", {}, packages.join("\n"))),
  ];
}

function traceGroup(group) {
  const score = scoreOf(group), special = differingFrom(group.runs[0]), rows = make("table", {});
  const filmed = group.runs.find((run) => run.videos.length), value = (name) => (run) => valueText(run.args[name]);
  table(rows, [
    ["Run", (run) => run.seed, (run) => runLink(run, `seed ${run.seed}`)],
    ["Score", (run) => run.score, (run) => show(run.score), true],
    ["State", statusOf, statusOf],
    ["Commit", (run) => run.commit, (run) => shortCommit(run.commit)],
    ...special.slice(0, 3).map((name) => [name, value(name), value(name)]),
  ], group.runs);
  const interval = known(score.low) ? ` ${intervalText(score)}` : "";
  const why = `First those in which runs of ${group.runs[0].algo} in this environment differ.`;
  const alone = group.runs.length < 3 ? " One or two runs say too little of the spread: there is no interval." : "";
  return [
    make("p", {}, `${group.env}: score ${show(score.mean)}${interval} over ${count(score.n, "ended run")}.${alone}`),
    traceChart(`${group.env}, ${group.label}`, group), filmed ? videoPart(filmed) : null,
    make("h3", {}, "Runs"), make("div", { class: "scroll" }, rows),
    make("h3", {}, "Hyperparameters"), hyperparameters(group.runs, special, why),
    make("h3", {}, "Command of the first"), make("pre", {}, group.runs[0].command || "not recorded"),
  ];
}

let opener = null;  // what had the focus before the panel opened
function renderTrace(another) {
  const panel = $("trace"), wasOpen = !panel.hidden, run = runById.get(state.run);
  const groups = () => [...groupsOf(shownRuns()), ...groupsOf(D.runs)];
  const group = state.group ? groups().find((candidate) => groupKey(candidate) === state.group) : null;
  panel.hidden = !state.run && !state.group;
  document.body.classList.toggle("tracing", !panel.hidden);
  if (wasOpen === panel.hidden) setTimeout(redraw, 0);  // the charts have more or less room now
  if (panel.hidden) {
    panel.replaceChildren();
    if (wasOpen && opener?.isConnected) opener.focus({ preventScroll: true });
    return;
  }
  const missing = make("p", {}, "This report has no run of that name.");
  const parts = (run ? traceRun(run) : group ? traceGroup(group) : [missing]).filter(Boolean);
  const title = make("h2", { id: "trace-h" }, run?.id ?? group?.label ?? (state.run || state.group));
  const close = button("✕", "close", () => change(TRACE_NOTHING));
  panel.replaceChildren(make("div", { class: "head" }, title, close), ...parts.map((part) => part.figure ?? part));
  for (const part of parts) part.draw?.();
  if (!another) return;
  panel.scrollTop = 0;
  if (!wasOpen) opener = document.activeElement;
  panel.focus({ preventScroll: true });
}

// ---------------------------------------------------------------------------------------------------------- the page

function choices(id, word, values) {
  const box = $(id), [title, list] = box.children;
  title.textContent = state[id].length ? `${word}: ${state[id].length} of ${values.length}` : `${word}: all`;
  const ticked = () => [...list.querySelectorAll("input:checked")].map((input) => input.value);
  const tickBox = (value) => make("input", { type: "checkbox", value, onchange: () => change({ [id]: ticked() }) });
  if (!list.childElementCount) list.append(...values.map((value) => make("label", {}, tickBox(value), value)));
  for (const input of list.querySelectorAll("input")) input.checked = state[id].includes(input.value);
}

function renderControls(runs) {
  choices("env", "Environments", ENVS);
  choices("algo", "Algorithms", ALGOS);
  for (const id of ["commit", "by", "metric", "x", "sort", "smooth"]) $(id).value = state[id];
  if ($("q").value !== state.q) $("q").value = state.q;
  for (const id of ["seeds", "refs"]) $(id).checked = state[id];
  const missing = runs.filter((run) => !run.curves[state.metric]?.[state.x]).length;
  const share = runs.length === D.runs.length ? "All" : `${runs.length.toLocaleString("en")} of`;
  const notes = [`${share} ${count(D.runs.length, "run")}`];
  const lacks = `${state.x === "time" ? "wall times" : "curve"} for ${metricName(state.metric)}`;
  if (missing) notes.push(`${count(missing, "run has", "runs have")} no ${lacks}`);
  if (state.smooth) notes.push(`each run smoothed over ${2 * state.smooth + 1} of its points`);
  $("shown").textContent = `${notes.join("; ")}.`;
}

// Draw what has changed since the last time.
let before = {};
function render() {
  const { run, group, video, ...rest } = state;
  const view = JSON.stringify([rest, dark()]), trace = JSON.stringify([run, group, video]);
  if (before.by !== state.by) assignLooks();
  if (before.view !== view) {
    const runs = shownRuns();
    renderControls(runs);
    renderCurves(runs);
    renderAggregates(runs);
    renderScores(runs);
    renderRuns(runs);
  }
  if (before.view !== view || before.trace !== trace) renderTrace(before.trace !== trace);
  for (const item of document.querySelectorAll("[data-key]")) item.ariaPressed = String(item.dataset.key === group);
  before = { view, trace, by: state.by };
}

// Draw the plots anew at the width that they have now.
function redraw() {
  for (const figure of document.querySelectorAll("figure")) figure.redraw?.();
}

function listenToControls() {
  const fromValue = (id, event, read) => $(id).addEventListener(event, () => change({ [id]: read($(id)) }));
  const selects = ["commit", "by", "metric", "x", "sort", "suite", "base"];
  for (const id of selects) fromValue(id, "change", (node) => node.value);
  for (const id of ["seeds", "refs"]) fromValue(id, "change", (node) => node.checked);
  fromValue("q", "input", (node) => node.value);
  let sliding = null;
  $("smooth").addEventListener("input", (event) => {  // many intervals take a moment: wait for the hand to rest
    clearTimeout(sliding);
    sliding = setTimeout(() => change({ smooth: Number(event.target.value) }), 120);
  });
  $("clear").addEventListener("click", () => {
    state = { ...FRESH, run: state.run, group: state.group, video: state.video };
    zooms.clear();
    before = {};
    change({});
  });
  $("controls").addEventListener("submit", (event) => event.preventDefault());
  $("copy-md").addEventListener("click", copyMarkdown);
  $("save-csv").addEventListener("click", saveCsv);
  $("more").addEventListener("click", () => { allRows = true; renderRuns(shownRuns()); });
}

function listenToPage() {
  document.querySelector(".skip").addEventListener("click", (event) => {  // the address holds the view
    event.preventDefault();
    $("curves").focus();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !$("trace").hidden) change(TRACE_NOTHING);
  });
  document.addEventListener("click", (event) => {
    for (const box of document.querySelectorAll(".choice[open]")) if (!box.contains(event.target)) box.open = false;
  });
  for (const name of ["popstate", "hashchange"]) addEventListener(name, () => { readHash(); render(); });
  let resizing = null;
  addEventListener("resize", () => { clearTimeout(resizing); resizing = setTimeout(redraw, 150); });
  const wanted = matchMedia("(prefers-color-scheme: dark)");
  const setTheme = (name) => { document.documentElement.dataset.theme = name; };
  wanted.addEventListener("change", () => { setTheme(wanted.matches ? "dark" : "light"); render(); });
  $("theme").addEventListener("click", () => { setTheme(dark() ? "light" : "dark"); render(); });
}

function begin() {
  fill($("commit"), CHOICES.commit.map((commit) => [commit, shortCommit(commit) || "all"]), "");
  fill($("by"), CHOICES.by.map((name) => [name, name]), "algorithm");
  fill($("metric"), D.metrics.map((tag) => [tag, metricName(tag)]), D.metrics[0]);
  $("summary").textContent = D.summary;
  $("options").open = innerWidth > 760;  // on a small screen the curves come first
  $("norm").textContent = D.norm_text;
  listenToControls();
  listenToPage();
  readHash();
  render();
}

begin();
