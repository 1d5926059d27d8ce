// Calls by implementation: which of the planned kernels really ran, how often, and how fast now.

import { makeShares } from "./charts.js";
import { make, makeTable, setText } from "./dom.js";
import * as format from "./format.js";

const TIERS = ["native", "tuned", "portable", "reference"];
const RATE_WINDOW_S = 4;
const COLUMNS = [
  { title: "op" },
  { title: "phase" },
  { title: "implementation" },
  { title: "tier" },
  { title: "calls", isNumber: true },
  { title: "calls/s", isNumber: true },
  { title: "share", isNumber: true },
];

/** A tier as a small sign; a word, so that colour is not needed. */
export function makeTier(tier) {
  const kind = TIERS.includes(tier) ? tier : "reference";
  return make("span", { class: `tier ${kind}` }, format.visible(tier, 20));
}

export class CallsView {
  constructor(parent) {
    this.parent = parent;
    this.shape = null;
    this.cells = [];
    this.shares = make("div", { class: "tier-shares" });
  }

  show(history) {
    const status = history.latest;
    if (status.engine === null) return;
    const rows = status.calls;
    const total = rows.reduce((sum, row) => sum + row.calls, 0);
    const earlier = history.before(RATE_WINDOW_S);
    const rates = ratesOf(rows, earlier, status);
    const order = rows.map((_, i) => i).sort((a, b) => rows[b].calls - rows[a].calls);
    const shape = JSON.stringify(order.map((i) => keyOf(rows[i])));
    if (shape !== this.shape) {
      this.shape = shape;
      this.build(order.map((i) => rows[i]));
    }
    order.forEach((i, place) => {
      const [calls, rate, share] = this.cells[place];
      setText(calls, format.count(rows[i].calls));
      setText(rate, format.rate(rates[i]));
      setText(share, format.percent(total === 0 ? NaN : rows[i].calls / total));
    });
    this.showShares(rows, total);
  }

  build(rows) {
    if (rows.length === 0) {
      this.parent.replaceChildren(make("p", { class: "empty" }, "The plan has no bound op."));
      return;
    }
    this.cells = rows.map(() => [0, 1, 2].map(() => make("span")));
    const table = makeTable(
      "Calls by op, phase and implementation, most calls first",
      COLUMNS,
      rows.map((row, i) => [
        format.visible(row.op),
        row.phase === "any" ? "" : format.visible(row.phase),
        make("code", {}, make("bdi", {}, format.visible(row.implementation))),
        makeTier(row.tier),
        ...this.cells[i],
      ]),
    );
    this.parent.replaceChildren(this.shares, table);
  }

  showShares(rows, total) {
    const text = total === 0 ? "no call yet" : describeShares(rows, total);
    if (this.shares.dataset.shown === text) return;
    this.shares.dataset.shown = text;
    const parts = sharesOf(rows, total);
    const legend = parts.map(({ name, share }) =>
      make("span", {}, makeTier(name), ` ${format.percent(share)}`),
    );
    this.shares.replaceChildren(
      makeShares(parts, `Calls by tier: ${text}`),
      make("p", { class: "legend" }, "of all calls since the start: ", ...legend),
    );
  }
}

function sharesOf(rows, total) {
  if (total === 0) return [];
  return TIERS.map((name) => {
    const calls = rows.filter((row) => row.tier === name).reduce((sum, row) => sum + row.calls, 0);
    return { name, kind: name, share: calls / total };
  }).filter(({ share }) => share > 0);
}

function describeShares(rows, total) {
  return sharesOf(rows, total)
    .map(({ name, share }) => `${name} ${format.percent(share)}`)
    .join(", ");
}

function keyOf(row) {
  return [row.op, row.phase, row.implementation, row.tier].join("\n");
}

function ratesOf(rows, earlier, latest) {
  if (earlier === null || earlier.engine === null) return rows.map(() => NaN);
  const before = new Map(earlier.calls.map((row) => [keyOf(row), row.calls]));
  const seconds = latest.at_s - earlier.at_s;
  return rows.map((row) => Math.max(0, row.calls - (before.get(keyOf(row)) ?? 0)) / seconds);
}
