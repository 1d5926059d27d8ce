// Small charts, drawn by hand in SVG.

import { make, makeSvg } from "./dom.js";

const WIDTH = 120;
const HEIGHT = 32;
const FEWEST = 30; // so that the first seconds are seen
const SLOTS = 120;

/** An empty chart; `drawSpark` fills it. */
export function makeSpark() {
  return makeSvg(
    "svg",
    { class: "spark", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" },
    makeSvg("path", { class: "area" }),
    makeSvg("path", { class: "line", "vector-effect": "non-scaling-stroke" }),
  );
}

/**
 * The latest values from the right edge to the left, zero at the bottom. `floor`: the least that
 * the top stands for, so that noise near zero stays small. What is no number is a gap.
 */
export function drawSpark(svg, values, label, floor) {
  const shown = values.slice(-SLOTS);
  const known = shown.filter(Number.isFinite);
  const top = Math.max(floor, ...known) * 1.08;
  const step = WIDTH / (Math.max(shown.length, FEWEST) - 1);
  const x = (i) => WIDTH - (shown.length - 1 - i) * step;
  const y = (value) => HEIGHT - 1 - (value / top) * (HEIGHT - 3);
  let line = "";
  let area = "";
  for (const [first, last] of runs(shown)) {
    const points = shown
      .slice(first, last + 1)
      .map((value, i) => `${x(first + i).toFixed(1)},${y(value).toFixed(1)}`);
    if (points.length === 1) points.push(points[0]); // a dot, by the line's round end
    line += `M${points.join("L")}`;
    area += `M${x(first).toFixed(1)},${HEIGHT}L${points.join("L")}L${x(last).toFixed(1)},${HEIGHT}Z`;
  }
  svg.children[0].setAttribute("d", area);
  svg.children[1].setAttribute("d", line);
  svg.setAttribute("aria-label", label);
}

/** [first, last] of each stretch of numbers. */
function runs(values) {
  const found = [];
  values.forEach((value, i) => {
    if (!Number.isFinite(value)) return;
    const current = found.at(-1);
    if (current && current[1] === i - 1) current[1] = i;
    else found.push([i, i]);
  });
  return found;
}

/** A bar of parts {name, share, kind}: `kind` is a class; parts below a thousandth are left out. */
export function makeShares(parts, label) {
  let at = 0;
  const bars = [];
  for (const { share, kind } of parts) {
    if (share < 0.001) continue;
    bars.push(
      makeSvg("rect", { class: kind, x: at.toFixed(3), y: 0, width: (share * 100).toFixed(3), height: 8 }),
    );
    at += share * 100;
  }
  return makeSvg(
    "svg",
    { class: "shares", viewBox: "0 0 100 8", preserveAspectRatio: "none", role: "img", "aria-label": label },
    ...bars,
  );
}

/** How full something is; `share` from 0 to 1. */
export function setMeter(meter, share) {
  const full = Number.isFinite(share) ? Math.min(1, Math.max(0, share)) : 0;
  meter.firstElementChild.style.width = `${(100 * full).toFixed(1)}%`;
  meter.classList.toggle("high", full >= 0.9);
}

export function makeMeter() {
  return make("div", { class: "meter", "aria-hidden": "true" }, make("div"));
}
