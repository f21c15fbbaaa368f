// Statistics over runs and their curves, by the formulas of cleanrl_utils/runs/stats.py and cleanrl_utils/report.py.
//
// Python has put the numbers of the view that the page opens with into D.numbers; they fill the cache. Another view's
// numbers are computed here when it is looked at. Scores come in groups, one array for each environment.
"use strict";

const D = JSON.parse(document.getElementById("data").textContent);

const known = (value) => value !== null && value !== undefined && !Number.isNaN(value);
const sum = (values) => values.reduce((total, value) => total + value, 0);
const mean = (values) => sum(values) / values.length;
const unique = (values) => [...new Set(values)];

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

// The 97.5 % quantile of Student's t: a table up to 10 degrees of freedom, then the expansion around the normal one.
const T = [NaN, 12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.306, 2.2622, 2.2281];
const Z = 1.959964;
const tQuantile = (df) =>
  T[df] ?? Z + (Z ** 3 + Z) / (4 * df) + (5 * Z ** 5 + 16 * Z ** 3 + 3 * Z) / (96 * df ** 2);

// What a plain bootstrap interval over groups of so many seeds is too short by. Two seeds say too little: no interval.
function widening(sizes) {
  const several = sizes.filter((size) => size > 1), freedom = sum(several) - several.length, n = mean(several);
  return freedom < 2 ? NaN : (Math.sqrt(n / (n - 1)) * tQuantile(freedom)) / Z;
}

// The 2.5 and 97.5 % percentiles of samples; without weights, each counts the same.
function percentiles(samples, weights) {
  const sorted = weights ? null : Float64Array.from(samples).sort();
  const order = weights && samples.map((_, i) => i).sort((a, b) => samples[a] - samples[b]);
  return [0.025, 0.975].map((q) => {
    if (!weights) return sorted[Math.max(0, Math.ceil(q * sorted.length - 1e-9) - 1)];
    const mass = sum(weights);
    let seen = 0;
    return samples[order.find((i) => (seen += weights[i]) >= q * mass - 1e-12) ?? order[order.length - 1]];
  });
}

const seedOf = (text) => [...text].reduce((seed, letter) => (Math.imul(seed, 31) + letter.charCodeAt(0)) | 0, 1);

// Seeds drawn anew within each group: every draw that there is if they are few, with their weights, or some at random.
function resample(groups, reps) {
  const [first] = groups, n = first.length;
  if (groups.length === 1 && n <= 6) {
    const { counts, weights } = draws(n);
    const pick = (draw) => first.flatMap((value, i) => Array(counts[draw * n + i]).fill(value));
    return { drawn: weights.map((_, draw) => [pick(draw)]), weights };
  }
  const random = generator(seedOf(JSON.stringify(groups)));
  const draw = (group) => group.map(() => group[Math.floor(random() * group.length)]);
  return { drawn: Array.from({ length: reps }, () => groups.map(draw)), weights: null };
}

// [point, low, high] of each of several statistics of groups of scores, from the same draws.
function bootstraps(groups, statistics, reps = 2000) {
  const { drawn, weights } = resample(groups, reps), factor = widening(groups.map((group) => group.length));
  return statistics.map((statistic) => {
    const point = statistic(groups), [low, high] = percentiles(drawn.map(statistic), weights);
    return [point, point + (low - point) * factor, point + (high - point) * factor];
  });
}

// A mean and its interval, of which only what lies in a range is kept: widened, it may leave what scores can be.
const clip = (value, [low, high]) => (known(value) ? Math.min(high, Math.max(low, value)) : value);
const within = ([point, low, high], range) => [point, clip(low, range), clip(high, range)];

const bootstrap = (groups, statistic, reps) => bootstraps(groups, [statistic], reps)[0];

// The interquartile mean: without the lowest and the highest quarter of all scores.
function iqm(groups) {
  const values = groups.flat().sort((a, b) => a - b), cut = Math.floor(values.length / 4);
  return mean(values.slice(cut, values.length - cut));
}

// The share of runs that score more than tau, mean over environments.
const above = (tau) => (groups) =>
  mean(groups.map((group) => group.filter((score) => score > tau).length / group.length));

// The probability that a run of the first half of the groups beats one of the second, by environment; ties count half.
function improvement(groups) {
  const half = groups.length / 2;
  const wins = (x, y) => mean(x.map((a) => mean(y.map((b) => (Math.sign(a - b) + 1) / 2))));
  return mean(groups.slice(0, half).map((x, i) => wins(x, groups[half + i])));
}

// The interval of a share: within 0 and 1, and at least as wide as Wilson's of so many trials, as a bootstrap of runs
// that have all won knows no loss.
function share([point, low, high], trials) {
  const z = Z ** 2 / trials, centre = (point + z / 2) / (1 + z);
  const margin = Math.sqrt(z * (point * (1 - point) + z / 4)) / (1 + z);
  return [point, Math.max(0, Math.min(low, centre - margin)), Math.min(1, Math.max(high, centre + margin))];
}

// As many trials tell as much as the pairs of some runs of x and y, by the variance of Mann and Whitney's U.
const trialsOf = (x, y) => (3 * x.length * y.length) / (x.length + y.length + 1);

// How often each of n seeds is drawn, [counts of one draw after the other], and the probability of each draw: every one
// that there is up to 6 seeds, some of equal weight beyond.
const draws = (n) => remembered(`draws ${n}`, () => (n > 6 ? someDraws(n, 1000) : allDraws(n)));

function someDraws(n, reps) {
  const random = generator(n), counts = new Float64Array(reps * n);
  for (let draw = 0; draw < reps; draw++) {
    for (let i = 0; i < n; i++) counts[draw * n + Math.floor(random() * n)]++;
  }
  return { counts, weights: null };
}

function allDraws(n) {
  const factorial = (k) => (k > 1 ? k * factorial(k - 1) : 1), counts = [], weights = [];
  const fill = (begun, left) => {
    if (begun.length < n - 1) {
      for (let k = 0; k <= left; k++) fill([...begun, k], left - k);
    } else {
      const full = [...begun, left];
      counts.push(...full);
      weights.push(full.reduce((product, k) => product / factorial(k), factorial(n)) / n ** n);
    }
  };
  fill([], n);
  return { counts: Float64Array.from(counts), weights };
}

// The means of the draws around the mean of a point's values, with the weights of those draws that hit a value.
function resampledMeans(values, centre) {
  const n = values.length, { counts, weights } = draws(n), samples = [], kept = [];
  const there = values.map((value) => (known(value) ? 1 : 0));
  const apart = values.map((value) => (known(value) ? value - centre : 0));
  for (let draw = 0; draw * n < counts.length; draw++) {
    let total = 0, hits = 0;
    for (let i = 0; i < n; i++) {
      total += counts[draw * n + i] * apart[i];
      hits += counts[draw * n + i] * there[i];
    }
    if (!hits) continue;
    samples.push(total / hits);
    if (weights) kept.push(weights[draw]);
  }
  return [samples, weights && kept];
}

// The interval of the mean at one point of several runs' curves, null where a run has no value: [low, high].
function meanInterval(values) {
  const present = values.filter(known), centre = mean(present), factor = widening([present.length]);
  if (Number.isNaN(factor)) return [null, null];
  return percentiles(...resampledMeans(values, centre)).map((apart) => centre + apart * factor);
}

// ------------------------------------------------------------------------------------------------------------ curves
// A curve of a run is [end, values]: the means of equal bins from 0 to its end, null where a bin is empty.
// A view says which: {metric, x: "steps" or "time", smooth: points on either side}.

const centres = (end, n) => Array.from({ length: n }, (_, i) => ((i + 0.5) / n) * end);

// A curve at other places, by straight lines between its points; null before the first and after the last of them.
function interpolate(x, y, places) {
  const at = x.map((_, i) => i).filter((i) => known(y[i])), slack = 1e-9 * x[x.length - 1];
  let i = 0;
  return places.map((place) => {
    while (i < at.length - 2 && x[at[i + 1]] < place) i++;
    const [a, b] = [at[i], at[Math.min(i + 1, at.length - 1)]];
    if (a === undefined || place < x[a] - slack || place > x[b] + slack) return null;
    return a === b ? y[a] : y[a] + ((y[b] - y[a]) * (place - x[a])) / (x[b] - x[a]);
  });
}

// A moving average over `reach` points on either side, of those that are known.
function smoothed(values, reach) {
  if (!reach) return values;
  const near = (i) => values.slice(Math.max(0, i - reach), i + reach + 1).filter(known);
  return values.map((value, i) => (known(value) ? mean(near(i)) : value));
}

function runCurve(run, view) {
  const curve = run.curves[view.metric]?.[view.x];
  if (!curve) return null;
  const [end, values] = curve;
  return { end, x: centres(end, values.length), y: smoothed(values, view.smooth) };
}

// Mean and interval of several runs on a common grid, as far as more than half of them go.
function groupCurve(runs, view) {
  const own = runs.map((run) => runCurve(run, view)).filter(Boolean);
  if (!own.length) return null;
  const end = Math.max(...own.map((curve) => curve.end)), n = Math.max(...own.map((curve) => curve.x.length));
  const x = centres(end, n), rows = own.map((curve) => interpolate(curve.x, curve.y, x));
  const columns = x.map((_, i) => rows.map((row) => row[i]));
  const counts = columns.map((column) => column.filter(known).length);
  const drawn = (value, i) => (2 * counts[i] > own.length ? value : null);
  const y = columns.map((column) => mean(column.filter(known))).map(drawn);
  if (own.length < 3) return { end, x, y, low: [], high: [], counts, of: own.length };
  const key = `band ${view.metric} ${view.x} ${view.smooth} ${runs.map((run) => run.index)}`;
  const [low, high] = remembered(key, () => {
    const range = D.seen[view.metric][runs[0].env], pairs = columns.map(meanInterval);
    return [0, 1].map((side) => pairs.map((pair) => clip(pair[side], range)));
  });
  return { end, x, y, low: low.map(drawn), high: high.map(drawn), counts, of: own.length };
}
