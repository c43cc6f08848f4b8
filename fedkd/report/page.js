"use strict";
// The pictures of a report, drawn from the numbers in #data with nothing but SVG.

const panels = JSON.parse(document.getElementById("data").textContent);
const DASHES = ["", "7 4", "2 3", "9 3 2 3"]; // as in plots.py: a second round of colours is dashed
const COLOURS = 10;
const W = 560, H = 320, LEFT = 46, RIGHT = 12, TOP = 10, BOTTOM = 40;
const hidden = new Set();
let current = 0;

const colour = (i) => `var(--c${i % COLOURS})`;
const dash = (i) => DASHES[Math.floor(i / COLOURS) % DASHES.length];

function svg(name, attributes = {}, parent = null, text = null) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== null) node.textContent = text;
  if (parent) parent.append(node);
  return node;
}

function html(name, parent, text = null, attributes = {}) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== null) node.textContent = text;
  parent.append(node);
  return node;
}

function amount(number) {
  const units = ["", " k", " M", " G", " T", " P"];
  let power = 0;
  while (Math.abs(number) >= 999.5 && power < units.length - 1) { number /= 1000; power += 1; }
  return `${+number.toPrecision(3)}${units[power]}`;
}

// Round numbers that cut [low, high] into about `count` pieces.
function ticks(low, high, count, whole = false) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  let step = [1, 2, 2.5, 5, 10].map((digit) => digit * power).find((size) => size >= rough);
  if (whole) step = Math.max(1, Math.ceil(step));
  const found = [];
  for (let tick = Math.ceil(low / step - 1e-9) * step; tick <= high + step * 1e-9; tick += step) found.push(+tick.toPrecision(12));
  return found;
}

function logTicks(low, high) {
  const decades = Math.log10(high / low);
  const digits = decades > 2.5 ? [1] : decades > 0.9 ? [1, 2, 5] : [1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9];
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1)
    for (const digit of digits) found.push(digit * 10 ** power);
  return found.filter((tick) => tick >= low * 0.999 && tick <= high * 1.001);
}

// Where the values of a scale lie on the page; `domain` grows to a point's breadth if it is one.
function scale([low, high], [from, to], log = false) {
  if (!(high > low)) [low, high] = log ? [low / 1.2, high * 1.2] : [low - 0.5, high + 0.5];
  const f = log ? Math.log : (value) => value;
  const place = (value) => from + ((f(value) - f(low)) / (f(high) - f(low))) * (to - from);
  return Object.assign(place, { low, high });
}

function frame(parent, title, note, height = H) {
  const figure = html("figure", parent);
  const head = html("h3", figure, title);
  if (note) { head.append(" "); html("small", head, note); }
  return svg("svg", { viewBox: `0 0 ${W} ${height}`, role: "img", "aria-label": title }, figure);
}

function xAxis(chart, place, marks, label, show = String, bottom = H - BOTTOM, left = LEFT) {
  for (const mark of marks) {
    svg("line", { class: "grid", x1: place(mark), x2: place(mark), y1: TOP, y2: bottom }, chart);
    svg("text", { x: place(mark), y: bottom + 16, "text-anchor": "middle" }, chart, show(mark));
  }
  svg("line", { class: "axis", x1: left, x2: W - RIGHT, y1: bottom, y2: bottom }, chart);
  svg("text", { x: (left + W - RIGHT) / 2, y: bottom + 34, "text-anchor": "middle" }, chart, label);
}

function yAxis(chart, place, marks, show = String) {
  for (const mark of marks) {
    svg("line", { class: "grid", x1: LEFT, x2: W - RIGHT, y1: place(mark), y2: place(mark) }, chart);
    svg("text", { x: LEFT - 8, y: place(mark) + 4, "text-anchor": "end" }, chart, show(mark));
  }
}

const tip = document.getElementById("tip");
function showTip(event, lines) {
  tip.replaceChildren();
  for (const [text, index] of lines) {
    const line = html("div", tip);
    if (index !== undefined) html("i", line, null, { style: `background:${colour(index)}` });
    line.append(text);
  }
  const { width, height } = tip.getBoundingClientRect();
  const x = event.clientX + 16 + width > window.innerWidth ? event.clientX - 16 - width : event.clientX + 16;
  tip.style.left = `${Math.max(4, x)}px`;
  tip.style.top = `${Math.min(event.clientY + 12, window.innerHeight - height - 8)}px`;
  tip.style.visibility = "visible";
}
const hideTip = () => { tip.style.visibility = "hidden"; };

// The pointer in the coordinates of a drawing.
function pointer(chart, event) {
  const box = chart.getBoundingClientRect();
  return [((event.clientX - box.left) * W) / box.width, ((event.clientY - box.top) * W) / box.width];
}

function lines(parent, panel, by) {
  const visible = panel.curves.map((curve, index) => ({ ...curve, index })).filter((curve) => !hidden.has(curve.label));
  const sent = by === "sent";
  const drawn = visible.filter((curve) => !sent || curve.sent.some((value) => value > 0));
  const silent = visible.filter((curve) => !drawn.includes(curve));
  const note = sent && silent.length ? "dotted: sends nothing" : panel.curves.some((curve) => curve.std) ? "mean ± deviation over seeds" : "";
  const what = panel.unit[0].toUpperCase() + panel.unit.slice(1);
  const chart = frame(parent, sent ? `${what} by numbers communicated` : `${what} by round`, note);
  if (!visible.length || (sent && !drawn.length)) {
    svg("text", { x: W / 2, y: H / 2, "text-anchor": "middle" }, chart, visible.length ? "nothing is communicated" : "everything is hidden");
    return;
  }
  const xs = drawn.flatMap((curve) => curve[by]).filter((value) => !sent || value > 0);
  const spread = (sign) => (curve) => curve.mean.map((mean, i) => mean + sign * (curve.std ? curve.std[i] : 0));
  const lows = visible.flatMap(spread(-1)), highs = visible.flatMap(spread(1));
  const x = scale([Math.min(...xs), Math.max(...xs)], [LEFT, W - RIGHT], sent);
  const bottom = Math.min(...lows), top = Math.max(...highs), room = 0.04 * (top - bottom);
  const y = scale([bottom - room, top + room], [H - BOTTOM, TOP]);
  xAxis(chart, x, sent ? logTicks(x.low, x.high) : ticks(x.low, x.high, 6, true), sent ? "numbers communicated" : "round", sent ? amount : String);
  yAxis(chart, y, ticks(y.low, y.high, 5), (mark) => String(+mark.toPrecision(6)));
  for (const { index, mean } of sent ? silent : [])
    svg("line", { x1: LEFT, x2: W - RIGHT, y1: y(mean.at(-1)), y2: y(mean.at(-1)), stroke: colour(index), "stroke-dasharray": "1 4", "stroke-width": 1.6, "data-label": visible.find((curve) => curve.index === index).label }, chart);
  for (const curve of drawn) {
    const points = curve[by].map((value, i) => [value, i]).filter(([value]) => !sent || value > 0);
    const path = (values) => points.map(([value, i]) => `${x(value).toFixed(1)},${y(values[i]).toFixed(1)}`);
    const group = svg("g", { "data-label": curve.label }, chart);
    if (curve.std) svg("polygon", { class: "band", fill: colour(curve.index), points: [...path(spread(1)(curve)), ...path(spread(-1)(curve)).reverse()].join(" ") }, group);
    svg("polyline", { class: "curve", stroke: colour(curve.index), "stroke-dasharray": dash(curve.index), points: path(curve.mean).join(" ") }, group);
    if (points.length <= 30) for (const [value, i] of points) svg("circle", { cx: x(value), cy: y(curve.mean[i]), r: 2.2, fill: colour(curve.index) }, group);
  }
  hover(chart, drawn, by, x, y, panel);
}

// Beside the pointer: by round, all curves there, best first; by communication, the nearest point.
function hover(chart, drawn, by, x, y, panel) {
  const cross = svg("line", { class: "cross", y1: TOP, y2: H - BOTTOM, visibility: "hidden" }, chart);
  const ring = svg("circle", { r: 5, fill: "none", "stroke-width": 2, visibility: "hidden" }, chart);
  const percent = panel.unit.endsWith("%") ? " %" : "";
  const value = (curve, i) => `${curve.mean[i].toFixed(percent ? 2 : 4)}${curve.std ? ` ± ${curve.std[i].toFixed(percent ? 2 : 4)}` : ""}${percent}`;
  chart.addEventListener("pointermove", (event) => {
    const [px, py] = pointer(chart, event);
    let best = { distance: Infinity };
    for (const curve of drawn)
      curve[by].forEach((at, i) => {
        if (by === "sent" && !(at > 0)) return;
        const distance = Math.hypot(x(at) - px, by === "sent" ? y(curve.mean[i]) - py : 0);
        if (distance < best.distance) best = { distance, curve, i, at };
      });
    if (!best.curve) return;
    if (by === "round") {
      const there = drawn.map((curve) => [curve, curve.round.indexOf(best.at)]).filter(([, i]) => i >= 0);
      there.sort(([a, i], [b, j]) => b.mean[j] - a.mean[i]);
      cross.setAttribute("x1", x(best.at)); cross.setAttribute("x2", x(best.at)); cross.setAttribute("visibility", "visible");
      showTip(event, [[`round ${best.at}`], ...there.map(([curve, i]) => [`${value(curve, i)}  ${curve.label}`, curve.index])]);
    } else {
      ring.setAttribute("cx", x(best.at)); ring.setAttribute("cy", y(best.curve.mean[best.i]));
      ring.setAttribute("stroke", colour(best.curve.index)); ring.setAttribute("visibility", "visible");
      showTip(event, [[best.curve.label, best.curve.index], [`${value(best.curve, best.i)} after ${amount(best.at)}, round ${best.curve.round[best.i]}`]]);
    }
  });
  chart.addEventListener("pointerleave", () => {
    for (const mark of [cross, ring]) mark.setAttribute("visibility", "hidden");
    hideTip();
  });
}

// A line of dots for every row: the clients' accuracies at the end.
function strips(parent, panel) {
  const place = new Map(panel.curves.map((curve, index) => [curve.label, index]));
  const visible = panel.spreads.filter((spread) => place.has(spread.label) && !hidden.has(spread.label));
  if (!visible.length) return;
  const step = Math.min(46, Math.max(18, 260 / visible.length)), bottom = TOP + step * visible.length + 4;
  const chart = frame(parent, "Accuracy of every client, %", "a dot a client, first seed; the stroke is their mean", bottom + BOTTOM);
  const all = visible.flatMap((spread) => spread.values.map(([, accuracy]) => accuracy));
  const left = LEFT + 84;
  const x = scale([Math.min(...all), Math.max(...all)], [left + 8, W - RIGHT - 4]);
  xAxis(chart, x, ticks(x.low, x.high, 6), "accuracy, %", (mark) => String(+mark.toPrecision(4)), bottom, left);
  visible.forEach((spread, line) => {
    const middle = TOP + step * (line + 0.5), index = place.get(spread.label);
    const group = svg("g", { "data-label": spread.label }, chart);
    svg("text", { x: left - 6, y: middle + 4, "text-anchor": "end" }, group, spread.label.length > 20 ? `${spread.label.slice(0, 19)}…` : spread.label);
    for (const [client, accuracy, samples] of spread.values) {
      const jitter = (((client * 0.618034) % 1) - 0.5) * step * 0.55; // dots side by side, the same at every drawing
      const dot = svg("circle", { cx: x(accuracy), cy: middle + jitter, r: 3, fill: colour(index), "fill-opacity": 0.55 }, group);
      dot.addEventListener("pointermove", (event) => showTip(event, [[spread.label, index], [`client ${client}: ${accuracy.toFixed(2)} %, ${amount(samples)} training samples`]]));
      dot.addEventListener("pointerleave", hideTip);
    }
    const mean = spread.values.reduce((sum, [, accuracy]) => sum + accuracy, 0) / spread.values.length;
    svg("line", { x1: x(mean), x2: x(mean), y1: middle - step * 0.4, y2: middle + step * 0.4, stroke: "var(--ink)", "stroke-width": 2 }, group);
  });
}

// Clients × classes; the area of a dot is the number of samples.
function split(parent, { step, clients, counts }) {
  if (!counts.length) return;
  const classes = counts[0].length, most = Math.max(...counts.flat());
  const total = counts.flat().reduce((sum, count) => sum + count, 0);
  const note = `${clients} clients, ${classes} classes, ${amount(total * step)} samples${step > 1 ? `, one client in ${step} drawn` : ""}`;
  const height = Math.min(420, Math.max(170, 26 * classes)), bottom = TOP + height;
  const chart = frame(parent, "Who holds which classes", note, bottom + BOTTOM);
  const cell = Math.min((W - LEFT - RIGHT) / counts.length, height / classes);
  const x = scale([-0.6, counts.length - 0.4], [LEFT, W - RIGHT]), y = scale([-0.6, classes - 0.4], [bottom, TOP]);
  xAxis(chart, x, ticks(0, counts.length - 1, 10, true), "client", (mark) => String(mark * step), bottom);
  for (const mark of ticks(0, classes - 1, 10, true)) svg("text", { x: LEFT - 8, y: y(mark) + 4, "text-anchor": "end" }, chart, mark);
  svg("text", { x: 10, y: TOP + height / 2, transform: `rotate(-90 10 ${TOP + height / 2})`, "text-anchor": "middle" }, chart, "class");
  counts.forEach((held, client) => held.forEach((count, kind) => {
    if (!count) return;
    const dot = svg("circle", { cx: x(client), cy: y(kind), r: Math.max(0.8, Math.min(cell, 26) * 0.48 * Math.sqrt(count / most)), fill: colour(0), "fill-opacity": 0.8 }, chart);
    dot.addEventListener("pointermove", (event) => showTip(event, [[`client ${client * step}, class ${kind}: ${count} samples`]]));
    dot.addEventListener("pointerleave", hideTip);
  }));
}

function emphasise(label) {
  for (const node of document.querySelectorAll("#charts [data-label]")) node.classList.toggle("faded", label !== null && node.dataset.label !== label);
}

function draw() {
  const panel = panels[current], charts = document.getElementById("charts"), legend = document.getElementById("legend");
  document.querySelectorAll("#tabs button").forEach((tab, i) => tab.setAttribute("aria-selected", i === current));
  hideTip();
  charts.replaceChildren();
  legend.replaceChildren();
  panel.curves.forEach((curve, index) => {
    const button = html("button", legend, null, { type: "button", "aria-pressed": !hidden.has(curve.label), title: "show or hide" });
    svg("line", { x1: 0, x2: 22, y1: 5, y2: 5, stroke: colour(index), "stroke-width": 2.4, "stroke-dasharray": dash(index) }, svg("svg", { viewBox: "0 0 22 10" }, button));
    button.append(curve.label);
    button.addEventListener("click", () => { hidden.delete(curve.label) || hidden.add(curve.label); draw(); });
    button.addEventListener("pointerenter", () => emphasise(curve.label));
    button.addEventListener("pointerleave", () => emphasise(null));
  });
  lines(charts, panel, "round");
  lines(charts, panel, "sent");
  strips(charts, panel);
  split(charts, panel.split);
}

// Differences carry a tint, above the paper or below it: the further within their column, the stronger.
function tint() {
  const columns = new Map();
  for (const cell of document.querySelectorAll("td.delta")) {
    const number = parseFloat(cell.textContent.replace("−", "-"));
    if (Number.isFinite(number)) columns.set(cell.cellIndex, [...(columns.get(cell.cellIndex) ?? []), [cell, number]]);
  }
  for (const cells of columns.values()) {
    const furthest = Math.max(...cells.map(([, number]) => Math.abs(number)), 1e-9);
    for (const [cell, number] of cells)
      cell.style.background = `rgba(var(${number >= 0 ? "--above" : "--below"}), ${(0.3 * Math.abs(number) / furthest).toFixed(3)})`;
  }
}

tint();
if (panels.length) {
  document.getElementById("pictures").hidden = false;
  const tabs = document.getElementById("tabs");
  if (panels.length > 1)
    panels.forEach((panel, i) => html("button", tabs, panel.title, { type: "button", role: "tab" }).addEventListener("click", () => { current = i; draw(); }));
  else tabs.hidden = true;
  draw();
}
