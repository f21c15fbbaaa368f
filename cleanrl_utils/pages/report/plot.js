// Plots as SVG, without a library: axes, curves with bands, rows of intervals, zoom, and export as files.
//
// An SVG element is made of attributes alone, without a style sheet, so what is on the screen is also a file.

// ----------------------------------------------------------------------------------------------------- small helpers

const SVG_TAGS = ["svg", "g", "path", "line", "text", "rect", "circle", "clipPath", "title"];

// An element with attributes (or "on..." handlers) and children, which are elements or text. Text never becomes HTML.
function make(tag, attributes = {}, ...children) {
  const svg = SVG_TAGS.includes(tag);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && known(value)) node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

const button = (text, label, action) =>
  make("button", { type: "button", "aria-label": label, title: label, onclick: action }, text);

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
  const size = Math.abs(value);
  const [scale, letter] = size >= 1e9 ? [1e9, "G"] : size >= 1e6 ? [1e6, "M"] : size >= 1e4 ? [1e3, "k"] : [1, ""];
  return String(Number((value / scale).toPrecision(6))) + letter;
}

// The unit of a time axis that ends after so many seconds: [its name, seconds].
const timeUnit = (seconds) => (seconds > 7200 ? ["hours", 3600] : seconds > 120 ? ["minutes", 60] : ["seconds", 1]);

function duration(seconds) {
  const [name, size] = timeUnit(seconds);
  return `${Number((seconds / size).toPrecision(3))} ${name}`;
}

// Round tick positions, about n of them, at 1, 2 or 5 times a power of ten.
function ticks(low, high, n) {
  const rough = (high - low) / n, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((digit) => digit * power).find((candidate) => candidate >= rough);
  const first = Math.ceil(low / step - 1e-9), last = Math.floor(high / step + 1e-9);
  return Array.from({ length: Math.min(last - first + 1, 3 * n) || 0 }, (_, i) => (first + i) * step + 0);  // no -0
}

function download(name, blob) {
  const link = make("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

// ----------------------------------------------------------------------------------------------------------- colours
// After Okabe and Ito, so that people with a colour vision deficiency can tell them apart; then dashes.

const COLOURS = {
  light: ["#0072B2", "#D55E00", "#009E73", "#C2559A", "#A87900", "#56B4E9", "#6B6B6B"],
  dark: ["#4DA6E8", "#F08A3C", "#2EC59B", "#E48CC8", "#F0E442", "#A6DCFF", "#B9B9B9"],
};
const DASHES = ["", "7 3", "2 3", "9 3 2 3"];
const INKS = {
  light: { ink: "#1c2026", soft: "#5b6470", line: "#e3e7ec", back: "#ffffff", colours: COLOURS.light },
  dark: { ink: "#e6e9ee", soft: "#a0a9b5", line: "#303741", back: "#1b1f25", colours: COLOURS.dark },
};
const dark = () => document.documentElement.dataset.theme === "dark";
const theme = () => INKS[dark() ? "dark" : "light"];

// ---------------------------------------------------------------------------------------------------- curves as SVG
// A plot is made from {title, x, y, series, lines}: a series is {name, colour, dash, faint, x, y, low, high, end,
// markers}, with null where there is nothing; lines are level, {y, colour, name}.

const WIDTH = 480, HEIGHT = 290, MARGIN = { left: 54, right: 20, top: 22, bottom: 38 };
const FONT = "system-ui, 'DejaVu Sans', sans-serif";
let plots = 0;

// Whether two values are the same but for rounding, and how far apart to draw them: then not at 0.
const same = (low, high) => !(high - low > 1e-9 * Math.max(Math.abs(low), Math.abs(high)));
const apart = (low, high) => (same(low, high) ? Math.abs(high) || 1 : high - low);

// The range of y that shows all means of the visible part, and of the intervals what lies near them.
function yRange(series, [from, to], lines) {
  let low = Infinity, high = -Infinity;
  const include = (value) => { low = Math.min(low, value); high = Math.max(high, value); };
  const each = (s, values, use) =>
    values?.forEach((value, i) => { if (known(value) && s.x[i] >= from && s.x[i] <= to) use(value); });
  for (const s of series) each(s, s.y, include);
  for (const line of lines) include(line.y);
  if (low === Infinity) return [0, 1];
  const reach = 0.3 * apart(low, high), [least, most] = [low - reach, high + reach];
  for (const s of series) {
    for (const side of [s.low, s.high]) each(s, side, (value) => include(Math.min(most, Math.max(least, value))));
  }
  const pad = 0.04 * apart(low, high);
  return [low - pad, high + pad];
}

// From values to pixels and back.
const scale = ([from, to], [a, b]) => ({
  range: [from, to],
  to: (value) => a + ((value - from) / (to - from)) * (b - a),
  from: (pixel) => from + ((pixel - a) / (b - a)) * (to - from),
});

function linePath(s, x, y) {
  const points = s.x.map((value, i) => known(s.y[i]) && `${x(value).toFixed(1)} ${y(s.y[i]).toFixed(1)}`);
  const there = points.filter(Boolean);
  return there.length === 1 ? `M${there[0]}h0.1` : there.length ? `M${there.join("L")}` : "";  // one point is a dot
}

function bandPath(s, x, y) {
  const at = s.x.map((_, i) => i).filter((i) => known(s.low[i]) && known(s.high[i]));
  if (at.length < 2) return "";
  const point = (i, value) => `${x(s.x[i]).toFixed(1)} ${y(value).toFixed(1)}`;
  const [there, back] = [at.map((i) => point(i, s.high[i])), at.reverse().map((i) => point(i, s.low[i]))];
  return `M${there.join("L")}L${back.join("L")}Z`;
}

// Axes: ticks with their numbers, level grid lines, and what is measured.
function axes(box, xs, ys, spec, inks) {
  const parts = [], text = { fill: inks.soft, "font-size": 12 }, middle = { ...text, "text-anchor": "middle" };
  for (const value of ticks(...ys.range, 5)) {
    const y = ys.to(value);
    parts.push(make("line", { x1: box.left, x2: box.right, y1: y, y2: y, stroke: inks.line }));
    parts.push(make("text", { ...text, x: box.left - 6, y: y + 4, "text-anchor": "end" }, tick(value)));
  }
  const unit = spec.x.unit ?? 1;
  for (const value of ticks(xs.range[0] / unit, xs.range[1] / unit, 5)) {
    const x = xs.to(value * unit);
    parts.push(make("line", { x1: x, x2: x, y1: box.bottom, y2: box.bottom + 4, stroke: inks.soft }));
    parts.push(make("text", { ...middle, x, y: box.bottom + 17 }, tick(value)));
  }
  parts.push(make("line", { x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom, stroke: inks.soft }));
  parts.push(make("text", { ...middle, x: (box.left + box.right) / 2, y: box.bottom + 33 }, spec.x.label));
  parts.push(make("text", { ...text, x: box.left, y: box.top - 9 }, spec.y.label ?? ""));
  return parts;
}

const heading = (text, inks) =>
  make("text", { x: 8, y: -8, fill: inks.ink, "font-size": 14, "font-weight": 600 }, text);

// The names of series in two columns below a plot that becomes a file.
function fileLegend(series, inks, width) {
  return series.flatMap((s, i) => {
    const x = 10 + (i % 2) * (width / 2), y = HEIGHT + 8 + Math.floor(i / 2) * 18;
    const look = { stroke: s.colour, "stroke-width": 2.5, "stroke-dasharray": s.dash };
    return [
      make("line", { x1: x, x2: x + 22, y1: y, y2: y, ...look }),
      make("text", { x: x + 28, y: y + 4, fill: inks.ink, "font-size": 12 }, s.name),
    ];
  });
}

// A triangle on a curve, such as that of a video.
function triangle(marker, x, y, s, inks) {
  const look = { fill: s.colour, stroke: inks.back, "stroke-width": 1.2, style: "cursor:pointer" };
  const d = `M${x - 4} ${y - 6}L${x + 7} ${y}L${x - 4} ${y + 6}Z`;
  const shape = make("path", { class: "marker", d, ...look }, make("title", {}, marker.text));
  shape.addEventListener("click", (event) => { event.stopPropagation(); marker.pick(); });
  return shape;
}

// The names of level lines above them; of those that would lie on each other, the first and how many more.
function lineLabels(lines, ys, x, inks) {
  const labels = [];
  for (const { y, colour, name } of lines) {
    const near = labels.find((label) => Math.abs(label.y - ys.to(y)) < 12);
    if (near) near.more += 1;
    else labels.push({ y: ys.to(y), colour, name, more: 0 });
  }
  const look = { "font-size": 11, stroke: inks.back, "stroke-width": 3, "paint-order": "stroke" };
  return labels.map(({ y, colour, name, more }) =>
    make("text", { x, y: y - 4, fill: colour, ...look }, `published: ${name}${more ? ` and ${more} more` : ""}`));
}

// Everything inside the axes. Many bands hide each other: then they are pale, and one is seen under the pointer.
function inside(spec, xs, ys, box, inks, shade) {
  const parts = [];
  spec.series.forEach((s, i) => {
    if (!s.low?.length) return;
    const look = { fill: s.colour, "fill-opacity": shade };
    parts.push(make("path", { class: "band", "data-series": i, d: bandPath(s, xs.to, ys.to), ...look }));
  });
  for (const line of spec.lines ?? []) {
    const look = { stroke: line.colour, "stroke-width": 1.3, "stroke-dasharray": "1.5 4", "stroke-linecap": "round" };
    parts.push(make("line", { x1: box.left, x2: box.right, y1: ys.to(line.y), y2: ys.to(line.y), ...look }));
  }
  spec.series.forEach((s, i) => {
    const strength = s.faint ? { "stroke-width": 1, "stroke-opacity": 0.45 } : { "stroke-width": 2 };
    const dot = s.y.filter(known).length === 1 ? { "stroke-width": 6, "stroke-linecap": "round" } : {};
    const look = { stroke: s.colour, "stroke-dasharray": s.dash, ...strength, ...dot };
    parts.push(make("path", { class: "curve", "data-series": i, d: linePath(s, xs.to, ys.to), ...look }));
  });
  parts.push(...lineLabels(spec.lines ?? [], ys, box.left + 4, inks));
  for (const s of spec.series) {
    for (const marker of s.markers ?? []) parts.push(triangle(marker, xs.to(marker.x), ys.to(marker.y), s, inks));
  }
  return parts;
}

// Curves as an SVG element, with the scales to find one's way in it. `whole` is for a file: with title and legend.
function plot(spec, zoom, inks, whole = false, width = WIDTH) {
  const named = spec.series.filter((s) => !s.faint), shade = named.length > 4 ? (whole ? 0.1 : 0.05) : 0.17;
  const top = whole ? 30 : 0, below = whole ? 12 + 18 * Math.ceil(named.length / 2) : 0;
  const box = { left: MARGIN.left, right: width - MARGIN.right, top: MARGIN.top, bottom: HEIGHT - MARGIN.bottom };
  const full = spec.x.range ?? [0, Math.max(...spec.series.map((s) => s.end), 1e-9)];
  const xs = scale(zoom?.x ?? full, [box.left, box.right]);
  const ys = scale(zoom?.y ?? spec.y.range ?? yRange(spec.series, xs.range, spec.lines ?? []), [box.bottom, box.top]);
  const area = { x: box.left, y: box.top - 2, width: box.right - box.left, height: box.bottom - box.top + 4 };
  const id = `clip${++plots}`, data = { "clip-path": `url(#${id})`, fill: "none", "stroke-linejoin": "round" };
  const about = { role: "img", "aria-label": spec.describe ?? spec.title, "font-family": FONT };
  const svg = make(
    "svg", { viewBox: `0 ${-top} ${width} ${HEIGHT + top + below}`, ...about, "data-x": xs.range.join(" ") },
    make("clipPath", { id }, make("rect", area)), spec.series.length ? axes(box, xs, ys, spec, inks) : [],
    make("g", data, inside(spec, xs, ys, box, inks, shade)),
  );
  if (whole) svg.append(heading(spec.title, inks), ...fileLegend(named, inks, width));
  if (!spec.series.length) {
    const place = { x: width / 2, y: HEIGHT / 2, fill: inks.soft, "text-anchor": "middle", "font-size": 14 };
    svg.append(make("text", place, spec.empty ?? "nothing to show"));
  }
  return { svg, xs, ys, box, full, spec, width, shade };
}

// Points with their intervals as an SVG element: {title, rows: [{name, colour, point, low, high}], range, line, x}.
function intervalPlot(spec, inks, whole = false) {
  const row = 22, longest = Math.max(...spec.rows.map((r) => r.name.length));
  const left = Math.min(240, Math.max(90, 16 + 6.6 * longest)), right = WIDTH - 60, bottom = 12 + row * spec.rows.length, top = whole ? 30 : 0;
  const values = spec.rows.flatMap((r) => [r.point, r.low, r.high]).filter(known);
  let [low, high] = spec.range ?? [Math.min(...values), Math.max(...values)];
  if (same(low, high)) [low, high] = [low - 0.5, low + 0.5];
  const x = scale([low, high], [left, right]).to, text = { fill: inks.soft, "font-size": 12 };
  const words = `${spec.title}: ${spec.rows.map((r) => `${r.name} ${show(r.point)}`).join(", ")}`;
  const about = { role: "img", "aria-label": words, "font-family": FONT };
  const svg = make("svg", { viewBox: `0 ${-top} ${WIDTH} ${bottom + 42 + top}`, ...about });
  for (const value of ticks(low, high, 6)) {
    svg.append(make("line", { x1: x(value), x2: x(value), y1: 6, y2: bottom, stroke: inks.line }));
    svg.append(make("text", { ...text, x: x(value), y: bottom + 16, "text-anchor": "middle" }, tick(value)));
  }
  if (known(spec.line)) {
    const look = { stroke: inks.soft, "stroke-dasharray": "3 3" };
    svg.append(make("line", { x1: x(spec.line), x2: x(spec.line), y1: 4, y2: bottom, ...look }));
  }
  spec.rows.forEach((r, i) => {
    const y = 12 + row * (i + 0.5), name = r.name.length > 34 ? `${r.name.slice(0, 33)}…` : r.name;
    const place = { x: left - 10, y: y + 4, "text-anchor": "end", fill: inks.ink, "font-size": 12 };
    const look = { stroke: r.colour, "stroke-width": 7, "stroke-opacity": 0.4 };
    svg.append(make("text", place, name, make("title", {}, r.name)));
    if (known(r.low)) svg.append(make("line", { x1: x(r.low), x2: x(r.high), y1: y, y2: y, ...look }));
    svg.append(make("circle", { cx: x(r.point), cy: y, r: 4.5, fill: r.colour }));
    svg.append(make("text", { ...text, x: right + 8, y: y + 4 }, show(r.point)));
  });
  svg.append(make("text", { ...text, x: WIDTH / 2, y: bottom + 33, "text-anchor": "middle" }, spec.x));
  if (whole) svg.append(heading(spec.title, inks));
  return { svg };
}

// ------------------------------------------------------------------------------------------------------------ export

// A plot as a file: always on white, with its title and legend in it.
function exportSvg(paint, title) {
  const { svg } = paint(INKS.light, true), [x, y, width, height] = svg.getAttribute("viewBox").split(" ");
  svg.setAttribute("width", width);
  svg.setAttribute("height", height);
  svg.prepend(make("rect", { x, y, width, height, fill: "#ffffff" }));
  const name = title.replace(/[^\w.-]+/g, "-").replace(/^-+|-+$/g, "") || "plot";
  return { name, width: Number(width), height: Number(height), text: new XMLSerializer().serializeToString(svg) };
}

function saveSvg(paint, title) {
  const file = exportSvg(paint, title);
  download(`${file.name}.svg`, new Blob([file.text], { type: "image/svg+xml" }));
}

async function savePng(paint, title) {
  const file = exportSvg(paint, title), image = new Image();
  const canvas = make("canvas", { width: file.width * 3, height: file.height * 3 });
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(file.text)}`;
  await image.decode();
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  canvas.toBlob((blob) => download(`${file.name}.png`, blob), "image/png");
}

const exportButtons = (paint, title) => [
  button("SVG", "save as SVG", () => saveSvg(paint, title)),
  button("PNG", "save as PNG", () => savePng(paint, title)),
];

// A figure around a plot that needs no zoom.
function still(title, paint) {
  const tools = make("div", { class: "tools" }, exportButtons(paint, title));
  const head = make("div", { class: "head" }, make("h3", {}, title), tools);
  return make("figure", { class: "still", "data-title": title }, head, paint(theme(), false).svg);
}

// --------------------------------------------------------------------------------------- a chart that can be zoomed

// The index of the known point of a series that is nearest to a place, null if there is none near.
function indexAt(s, wanted) {
  if (!s.x.length || wanted < 0 || wanted > s.end) return null;
  const i = Math.min(s.x.length - 1, Math.floor((wanted / s.end) * s.x.length));
  for (let d = 0; d <= 3; d++) for (const j of [i - d, i + d]) if (known(s.y[j])) return j;
  return null;
}

const zooms = new Map();  // of each chart by its key, so that they outlive a change of the view

// A figure around plot(): `spec(inks)` says what to draw in which colours; a click on a curve calls `pick(series)`.
function chart(title, key, spec, pick) {
  const holder = make("div", { class: "holder" }), readout = make("div", { class: "readout", hidden: true });
  const view = { holder, readout, pick, drawn: null };
  view.draw = () => {
    const focused = holder.contains(document.activeElement);
    const width = Math.min(1000, Math.max(280, holder.clientWidth || WIDTH));
    view.drawn = plot(spec(theme()), zooms.get(key), theme(), false, width);
    view.drawn.svg.setAttribute("tabindex", 0);
    holder.replaceChildren(view.drawn.svg);
    if (focused) view.drawn.svg.focus({ preventScroll: true });
    readout.hidden = true;
  };
  view.setZoom = (x, y = null) => {
    const [from, to] = view.drawn.full, width = Math.min(to - from, Math.max((to - from) / 2000, x[1] - x[0]));
    const left = Math.min(Math.max(from, x[0]), to - width), all = width >= 0.999 * (to - from) && !y;
    zooms.set(key, all ? null : { x: [left, left + width], y });
    view.draw();
  };
  view.zoomed = () => Boolean(zooms.get(key));
  view.reset = () => { zooms.delete(key); view.draw(); };
  view.scaleBy = (factor, centre) => {
    const [from, to] = view.drawn.xs.range, middle = centre ?? (from + to) / 2;
    view.setZoom([middle - (middle - from) * factor, middle + (to - middle) * factor]);
  };
  view.shift = (part) => {
    const [from, to] = view.drawn.xs.range, by = (to - from) * part;
    view.setZoom([from + by, to + by], zooms.get(key)?.y);
  };
  listenToPointer(view);
  listenToKeys(view);
  const tools = make(
    "div", { class: "tools", role: "group", "aria-label": `Tools of the plot ${title}` },
    button("+", "zoom in", () => view.scaleBy(0.6)), button("−", "zoom out", () => view.scaleBy(1 / 0.6)),
    button("⤢", "show all", view.reset),
    exportButtons((inks, whole) => plot(spec(inks), zooms.get(key), inks, whole), title),
  );
  const head = make("div", { class: "head" }, make("h3", {}, title), tools);
  const figure = make("figure", { "data-title": title }, head, holder, readout);
  figure.redraw = () => view.drawn && view.draw();
  return { figure, holder, draw: view.draw };
}

// The series that comes nearest to a place in the plot, with the index of its point there.
function nearest({ drawn }, at) {
  let best = null;
  for (const s of drawn.spec.series) {
    const i = indexAt(s, drawn.xs.from(at.x));
    if (i === null) continue;
    const distance = Math.abs(drawn.ys.to(s.y[i]) - at.y) + (s.faint ? 3 : 0);
    if (!best || distance < best.distance) best = { s, i, distance };
  }
  return best;
}

// The curve under the pointer stands out, the others step back.
function highlight({ drawn }, best) {
  const chosen = best && best.distance < 16 ? drawn.spec.series.indexOf(best.s) : null;
  for (const path of drawn.svg.querySelectorAll("[data-series]")) {
    const own = Number(path.dataset.series) === chosen;
    path.setAttribute("opacity", chosen === null || own ? 1 : 0.35);
    if (path.classList.contains("band")) path.setAttribute("fill-opacity", own ? 0.28 : drawn.shade);
  }
}

// The values at a place, beside it.
function hover(view, at) {
  const { drawn, readout, holder } = view, { spec, box, width } = drawn;
  readout.hidden = at.x < box.left || at.x > box.right;
  const best = readout.hidden ? null : nearest(view, at);
  highlight(view, best);
  if (readout.hidden) return;
  const wanted = drawn.xs.from(at.x), found = spec.series.map((s) => ({ s, i: indexAt(s, wanted) }));
  const rows = found.filter(({ s, i }) => i !== null && (!s.faint || s === best?.s));
  rows.sort((a, b) => b.s.y[b.i] - a.s.y[a.i]);
  const lines = rows.slice(0, 12).map(({ s, i }) => {
    const interval = known(s.low?.[i]) ? ` [${show(s.low[i])}, ${show(s.high[i])}]` : "";
    const runs = s.of > 1 ? ` ${s.counts[i]} of ${s.of} runs` : "";
    const square = make("span", { style: `color:${s.colour}` }, "■ ");
    return make("div", { class: s === best?.s ? "near" : "" }, square, `${s.name}: ${show(s.y[i])}${interval}${runs}`);
  });
  readout.replaceChildren(make("div", {}, spec.x.say(wanted)), ...lines);
  const pixel = holder.clientWidth / width, { offsetWidth, offsetHeight } = readout;
  const beside = at.x > width / 2 ? at.x * pixel - offsetWidth - 14 : at.x * pixel + 14;
  const left = Math.max(0, Math.min(beside, holder.clientWidth - offsetWidth));
  const top = at.y > HEIGHT / 2 ? box.top : Math.max(box.top, box.bottom * pixel - offsetHeight - 4);
  readout.style.cssText = `left:${holder.offsetLeft + left}px;top:${holder.offsetTop + top}px`;
}

function listenToPointer(view) {
  const { holder } = view, touches = new Map();
  const selection = make("rect", { fill: "#56B4E9", "fill-opacity": 0.2, stroke: "#56B4E9" });
  let start = null, dragged = false, waiting = null;
  const place = (event) => {  // in the plot's own units
    const area = view.drawn.svg.getBoundingClientRect();
    const [right, down] = [event.clientX - area.left, event.clientY - area.top];
    return { x: (right / area.width) * view.drawn.width, y: (down / area.height) * HEIGHT };
  };
  const flat = (at) => Math.abs(at.y - start.y) < 14;  // a flat drag leaves y to itself
  const pinch = (event) => {  // two fingers: zoom by the change of their distance
    const other = [...touches.values()].find((touch) => touch.pointerId !== event.pointerId);
    const distance = (touch) => Math.max(20, Math.abs(touch.clientX - other.clientX));
    const before = touches.get(event.pointerId);
    touches.set(event.pointerId, event);
    view.scaleBy(distance(before) / distance(event), view.drawn.xs.from((place(event).x + place(other).x) / 2));
  };
  const select = (event, at) => {
    const { top, bottom } = view.drawn.box, x = { x: Math.min(at.x, start.x), width: Math.abs(at.x - start.x) };
    const y = { y: Math.min(at.y, start.y), height: Math.abs(at.y - start.y) };
    const area = { ...x, ...(flat(at) ? { y: top, height: bottom - top } : y) };
    for (const [name, value] of Object.entries(area)) selection.setAttribute(name, value);
    view.drawn.svg.append(selection);
    view.readout.hidden = true;
    holder.setPointerCapture(event.pointerId);
  };
  const stop = (event) => { touches.delete(event.pointerId); selection.remove(); start = null; };
  holder.addEventListener("pointerdown", (event) => {
    dragged = false;
    if (event.pointerType === "touch") touches.set(event.pointerId, event);
    else if (event.button === 0) start = place(event);
  });
  holder.addEventListener("pointermove", (event) => {
    const at = place(event);
    if (touches.has(event.pointerId) && touches.size === 2) pinch(event);
    else if (start && Math.hypot(at.x - start.x, at.y - start.y) > 5) select(event, at);
    else hover(view, at);
  });
  holder.addEventListener("pointerup", (event) => {
    const at = place(event), from = start, level = start && flat(at);
    stop(event);
    if (!from || Math.abs(at.x - from.x) <= 5) return;
    const { xs, ys } = view.drawn, [left, right] = [at.x, from.x].sort((a, b) => a - b);
    const [low, high] = [at.y, from.y].sort((a, b) => b - a);
    dragged = true;
    view.setZoom([xs.from(left), xs.from(right)], level ? null : [ys.from(low), ys.from(high)]);
  });
  holder.addEventListener("pointercancel", stop);
  holder.addEventListener("pointerleave", () => { view.readout.hidden = true; highlight(view, null); });
  holder.addEventListener("click", (event) => {
    const best = nearest(view, place(event));
    if (!view.pick || !best || best.distance >= 16 || dragged) return;
    clearTimeout(waiting);  // in a zoomed plot a second click may follow, which means to see all
    waiting = setTimeout(() => view.pick(best.s), view.zoomed() ? 250 : 0);
  });
  holder.addEventListener("dblclick", () => { clearTimeout(waiting); view.reset(); });
  holder.addEventListener("wheel", (event) => {  // a pinch on a touchpad comes as a wheel with Ctrl
    if (!event.ctrlKey && !event.metaKey && !holder.contains(document.activeElement)) return;
    event.preventDefault();
    view.scaleBy(event.deltaY > 0 ? 1.25 : 0.8, view.drawn.xs.from(place(event).x));
  }, { passive: false });
}

function listenToKeys(view) {
  const closer = () => view.scaleBy(0.6), farther = () => view.scaleBy(1 / 0.6);
  const [left, right] = [-0.2, 0.2].map((part) => () => view.shift(part));
  const actions = { "+": closer, "=": closer, "-": farther, 0: view.reset, ArrowLeft: left, ArrowRight: right };
  view.holder.addEventListener("keydown", (event) => {
    if (!actions[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    actions[event.key]();
  });
}
