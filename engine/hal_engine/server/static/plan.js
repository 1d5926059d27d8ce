// The plan in use: each call site with its choice, its tier, and why the others lost.

import { makeTier } from "./calls.js";
import { make, setText } from "./dom.js";
import * as format from "./format.js";

const FIRST_SHOWN = 60;
const WORST_FIRST = { reference: 0, portable: 1, tuned: 2, native: 3 };

export class PlanView {
  constructor({ parent, summary, hash, filters, text, tier }) {
    this.parent = parent;
    this.summary = summary;
    this.hash = hash;
    this.filters = filters;
    this.text = text;
    this.tier = tier;
    this.ops = [];
    this.most = FIRST_SHOWN;
    for (const input of [text, tier]) {
      input.addEventListener("input", () => {
        this.most = FIRST_SHOWN;
        this.draw();
      });
    }
  }

  show(plan) {
    setText(this.hash, format.visible(plan.hash ?? "", 40));
    this.ops = (plan.ops ?? []).map((op) => ({ op, words: wordsOf(op) }));
    this.filters.hidden = this.ops.length === 0;
    this.notes = plan.notes ?? [];
    this.draw();
  }

  failed(error) {
    setText(this.summary, "");
    this.parent.replaceChildren(make("p", { class: "empty" }, `The plan cannot be read: ${error.message}`));
  }

  draw() {
    const words = this.text.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = this.ops.filter(
      ({ op, words: own }) => isOfTier(op, this.tier.value) && words.every((w) => own.includes(w)),
    );
    // Weak tiers first, in the plan's order otherwise: sorting is stable.
    const ordered = [...found].sort(
      (a, b) => (WORST_FIRST[a.op.tier] ?? 0) - (WORST_FIRST[b.op.tier] ?? 0),
    );
    setText(this.summary, this.describe(found.length));
    const items = ordered.slice(0, this.most).map(({ op }) => makeOp(op));
    const parts = [make("ul", { class: "ops" }, ...items)];
    if (this.ops.length === 0) parts[0] = make("p", { class: "empty" }, "The plan has no op.");
    else if (found.length === 0) parts[0] = make("p", { class: "empty" }, "No call site is like that.");
    if (found.length > this.most) parts.push(this.makeMore(found.length));
    if (this.notes.length > 0) parts.push(makeNotes(this.notes));
    this.parent.replaceChildren(...parts);
  }

  describe(numFound) {
    if (this.ops.length === 0) return "";
    const tiers = Object.keys(WORST_FIRST)
      .reverse()
      .map((tier) => [tier, this.ops.filter(({ op }) => op.tier === tier).length])
      .filter(([, number]) => number > 0)
      .map(([tier, number]) => `${format.count(number)} ${tier}`);
    const waived = this.ops.filter(({ op }) => op.waiver !== null).length;
    if (waived > 0) tiers.push(`${format.count(waived)} with a waiver`);
    const all = `${format.count(this.ops.length)} decisions: ${tiers.join(", ")}`;
    return numFound === this.ops.length ? all : `${format.count(numFound)} of ${all}`;
  }

  makeMore(numFound) {
    const button = make("button", { type: "button" }, `Show all ${format.count(numFound)}`);
    button.addEventListener("click", () => {
      const next = this.most; // the focus goes on to the first that was not shown
      this.most = Infinity;
      this.draw();
      this.parent.querySelectorAll(".op summary")[next]?.focus();
    });
    return make("p", { class: "more" }, button);
  }
}

function isOfTier(op, tier) {
  if (tier === "") return true;
  return tier === "waived" ? op.waiver !== null : op.tier === tier;
}

function wordsOf(op) {
  const losers = (op.rejected ?? []).map((loser) => loser.name);
  return [op.site, op.op, op.phase, op.choice, op.tier, ...losers].join(" ").toLowerCase();
}

function makeOp(op) {
  const details = make(
    "details",
    { class: "op" },
    make(
      "summary",
      {},
      make("span", { class: "site" }, make("bdi", {}, siteOf(op))),
      make("span", { class: "what" }, format.visible(labelOf(op))),
      make("span", { class: "tokens" }, tokensOf(op)),
      make("code", { class: "choice" }, make("bdi", {}, format.visible(op.choice))),
      make("span", { class: "marks" }, makeTier(op.tier), op.waiver === null ? null : make("span", { class: "tier waived" }, "waiver")),
    ),
  );
  // The inside is made when it is first looked at: a plan may have a thousand losers.
  details.addEventListener("toggle", () => {
    if (details.open && details.childElementCount === 1) details.append(makeInside(op));
  });
  return make("li", {}, details);
}

function makeInside(op) {
  const facts = [
    ["loses to", op.lost ? lostText(op.lost) : null],
    ["to unlock", op.lost && op.lost.unlock.length > 0 ? op.lost.unlock.map((u) => format.visible(u)).join("; ") : null],
    ["waiver", op.waiver === null ? null : format.visible(op.waiver, 1000)],
    ["estimate", Number.isFinite(op.estimate_us) ? format.durationText(op.estimate_us / 1e6) : null],
    ["roofline", Number.isFinite(op.roofline_us) ? `${format.durationText(op.roofline_us / 1e6)}, by ${format.visible(op.roofline_by, 40)}` : null],
    ["means", (op.semantic_notes ?? []).map((note) => format.visible(note.text)).join("; ")],
    ["layers", op.layers.length > 0 ? layersOf(op.layers) : null],
    ["from", op.distribution ? format.visible(op.distribution, 80) : null],
  ].filter(([, value]) => value !== null && value !== "");
  const rows = facts.map(([term, value]) => make("div", {}, make("dt", {}, term), make("dd", {}, make("bdi", {}, value))));
  return make("div", { class: "inside" }, make("dl", { class: "facts" }, ...rows), makeLosers(op.rejected ?? []));
}

function makeLosers(rejected) {
  if (rejected.length === 0) return make("p", { class: "hint" }, "No other candidate was offered.");
  const items = rejected.map((loser) =>
    make(
      "li",
      {},
      make("code", {}, make("bdi", {}, format.visible(loser.name))),
      " ",
      makeTier(loser.tier),
      " ",
      make("span", { class: "why" }, make("bdi", {}, loser.reasons.map(reasonText).join("; "))),
    ),
  );
  return make("div", {}, make("p", { class: "hint" }, "Why the others lost:"), make("ul", { class: "losers" }, ...items));
}

function reasonText({ what, required, found }) {
  return `${format.visible(what)}: required ${format.visible(required)}, found ${format.visible(found)}`;
}

function lostText(lost) {
  const better = lost.better ? format.visible(lost.better) : "no candidate that is here";
  return `${better} (${format.visible(lost.better_tier, 20)})`;
}

function siteOf(op) {
  const layers = op.layers.length > 0 ? layersOf(op.layers) : "*";
  return format.visible(op.site.replace("*", layers));
}

/** "0–29", "0–2,4"; of many runs the first ones and the last. */
function layersOf(layers) {
  const runs = [];
  for (const layer of layers) {
    const current = runs.at(-1);
    if (current && layer === current[1] + 1) current[1] = layer;
    else runs.push([layer, layer]);
  }
  const texts = runs.map(([first, last]) => (first === last ? `${first}` : `${first}–${last}`));
  if (texts.length > 6) texts.splice(3, texts.length - 4, "…");
  return texts.join(",");
}

function labelOf(op) {
  return op.phase === "any" ? op.op : `${op.op} · ${op.phase}`;
}

function tokensOf(op) {
  const [low, high] = op.tokens;
  return low === high ? `${format.count(low)} tok` : `${format.count(low)}–${format.count(high)} tok`;
}

function makeNotes(notes) {
  const items = notes.map((note) => make("li", {}, make("bdi", {}, format.visible(note, 1000))));
  return make("details", { class: "notes" }, make("summary", {}, `Notes (${notes.length})`), make("ul", { class: "lines" }, ...items));
}
