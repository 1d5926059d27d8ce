// The figures at the top, and the cards beside the chat.

import { drawSpark, makeMeter, makeSpark, setMeter } from "./charts.js";
import { make, setText } from "./dom.js";
import * as format from "./format.js";

const RATE_WINDOW_S = 4;

const generated = (sample) => sample.engine.generated_tokens;
const prompt = (sample) => sample.engine.prompt_tokens;
const cores = (sample) => sample.process.cpu_time_s;

/** One figure: a title, a large value with its unit, a line below, a chart. */
class Figure {
  constructor(parent, title, { meter = false } = {}) {
    this.title = title;
    this.number = make("span", { class: "number" }, format.NONE);
    this.unit = make("span", { class: "unit" });
    this.below = make("p", { class: "below" });
    this.spark = makeSpark();
    this.meter = meter ? makeMeter() : null;
    parent.append(
      make(
        "article",
        { class: "figure" },
        make("h3", {}, title),
        make("p", { class: "value" }, this.number, " ", this.unit),
        this.below,
        this.meter,
        this.spark,
      ),
    );
  }

  show([number, unit], below, values, floor, describe) {
    setText(this.number, number);
    setText(this.unit, unit);
    setText(this.below, below);
    const known = values.filter(Number.isFinite);
    const label =
      known.length === 0
        ? `${this.title}: no data yet`
        : `${this.title} in the last ${values.length} samples: ` +
          `${describe(Math.min(...known))} to ${describe(Math.max(...known))}`;
    drawSpark(this.spark, values, label, floor);
  }
}

export class Overview {
  constructor(parent) {
    this.tokens = new Figure(parent, "Generated");
    this.first = new Figure(parent, "First token after");
    this.between = new Figure(parent, "Between tokens");
    this.sequences = new Figure(parent, "Sequences");
    this.cache = new Figure(parent, "KV cache", { meter: true });
    this.prompts = new Figure(parent, "Prompt");
  }

  show(history) {
    const { engine, latency } = history.latest;
    if (engine === null) return; // stopped: the last numbers stay, greyed
    this.showTokens(history, engine);
    this.showLatency(this.first, history, latency.time_to_first_token, "time_to_first_token");
    this.showLatency(this.between, history, latency.inter_token, "inter_token");
    this.sequences.show(
      [format.count(engine.running), "running"],
      `${format.count(engine.waiting)} waiting · ${format.count(engine.preemptions)} preempted so far`,
      history.values((s) => (s.engine === null ? NaN : s.engine.running + s.engine.waiting)),
      2,
      format.count,
    );
    const share = kvShare(history.latest);
    this.cache.show(
      [format.percent(share), ""],
      `${format.count(engine.kv_blocks_used)} of ${format.count(engine.kv_blocks_total)} blocks`,
      history.values(kvShare),
      0.2,
      format.percent,
    );
    setMeter(this.cache.meter, share);
  }

  showTokens(history, engine) {
    this.tokens.show(
      [format.rate(history.rate(generated, RATE_WINDOW_S)), "tok/s"],
      engine.generated_tokens === 0
        ? "nothing generated yet"
        : `${format.count(engine.generated_tokens)} tokens since the start`,
      history.rates(generated),
      5,
      format.rate,
    );
    const reused = engine.cached_prompt_tokens / engine.prompt_tokens;
    this.prompts.show(
      [format.rate(history.rate(prompt, RATE_WINDOW_S)), "tok/s"],
      engine.prompt_tokens === 0
        ? "no prompt yet"
        : `${format.count(engine.prompt_tokens)} tokens, ${format.percent(reused)} from the prefix cache`,
      history.rates(prompt),
      20,
      format.rate,
    );
  }

  showLatency(figure, history, summary, name) {
    const values = history.values((s) => s.latency[name].p50_s ?? NaN);
    let below = "no request yet";
    if (summary.count > 0) {
      below = `median of ${format.count(summary.count)} · p95 ${format.durationText(summary.p95_s)}`;
    } else if (summary.last_s !== null) {
      below = `none in the last minute; last ${format.durationText(summary.last_s)}`;
    }
    figure.show(
      format.duration(summary.p50_s ?? NaN),
      below,
      values,
      0.001,
      format.durationText,
    );
  }
}

function kvShare(sample) {
  if (sample.engine === null) return NaN;
  return sample.engine.kv_blocks_used / sample.engine.kv_blocks_total;
}

/** The devices of the plan; equal ones once. */
export function showDevices(parent, plan) {
  const groups = new Map();
  for (const device of plan.devices ?? []) {
    const key = [device.name, device.arch, device.memory_bytes].join("\n");
    groups.set(key, [...(groups.get(key) ?? []), device]);
  }
  const cards = [...groups.values()].map((devices) => {
    const [device] = devices;
    const ids = devices.map((one) => one.device_id).join(", ");
    const prefix = devices.length > 1 ? `${devices.length} × ` : "";
    return make(
      "div",
      { class: "device" },
      make("p", { class: "name" }, make("bdi", {}, prefix + format.visible(device.name))),
      makeFacts([
        ["id", format.visible(ids)],
        ["architecture", format.visible(device.arch)],
        ["vendor", format.visible(device.vendor)],
        ["memory", known(device, "memory_bytes", format.bytes)],
        ["bandwidth", known(device, "memory_bandwidth", (v) => `${format.magnitude(v)}B/s`)],
        ["peak", peaks(device)],
      ]),
    );
  });
  if (cards.length === 0) cards.push(make("p", { class: "empty" }, "The plan names no device."));
  cards.push(make("div", { class: "device", id: "process" }));
  parent.replaceChildren(...cards);
}

/** A value of a device with how it is known. */
function known(device, field, shown) {
  const value = device[field];
  if (!value) return null;
  const confidence = device.evidence?.[field]?.confidence;
  return confidence ? `${shown(value)} (${format.visible(confidence, 20)})` : shown(value);
}

function peaks(device) {
  const entries = Object.entries(device.peak_flops ?? {}).slice(0, 4);
  if (entries.length === 0) return null;
  return entries
    .map(([dtype, value]) => `${format.visible(dtype, 20)} ${format.magnitude(value)}FLOP/s`)
    .join(", ");
}

/** Terms and what they are; null leaves one out. */
export function makeFacts(pairs) {
  const rows = pairs
    .filter(([, value]) => value !== null && value !== "")
    .map(([term, value]) => make("div", {}, make("dt", {}, term), make("dd", {}, make("bdi", {}, value))));
  return make("dl", { class: "facts" }, ...rows);
}

/** What the server's process takes of this machine now. */
export function showProcess(history) {
  const parent = document.getElementById("process");
  if (parent === null) return; // no plan yet
  const earlier = history.before(RATE_WINDOW_S);
  const latest = history.latest;
  const busy =
    earlier === null ? NaN : (cores(latest) - cores(earlier)) / (latest.at_s - earlier.at_s);
  const texts = [format.bytes(latest.process.resident_bytes), format.rate(Math.max(0, busy))];
  if (parent.childElementCount === 0) {
    parent.append(
      make("p", { class: "name" }, "The server's process"),
      makeFacts([
        ["memory in use", texts[0]],
        ["CPU cores busy", texts[1]],
      ]),
    );
    return;
  }
  parent.querySelectorAll("bdi").forEach((element, i) => setText(element, texts[i]));
}

export function showWaivers(parent, status) {
  const { count } = status.waivers;
  if (parent.dataset.shown === String(count)) return;
  parent.dataset.shown = String(count);
  if (count === 0) {
    parent.replaceChildren(
      make("p", { class: "empty" }, "None: every op runs on the best path known for its device."),
    );
    return;
  }
  const link = make("a", { href: "#notice-degraded" }, "at the top of this page");
  parent.replaceChildren(make("p", {}, `${format.count(count)} in use, listed `, link, "."));
}

const OUTCOMES = {
  ok: "answered",
  client_error: "refused, the client's error",
  overload: "refused, overload or drain",
  disconnected: "client went away",
  deadline: "deadline passed",
  error: "failed",
};

export function showRequests(parent, status) {
  const pairs = [["being answered", format.count(status.requests.active)]];
  for (const [outcome, words] of Object.entries(OUTCOMES)) {
    const number = status.requests.by_outcome[outcome];
    if (number || outcome === "ok") pairs.push([words, format.count(number ?? 0)]);
  }
  pairs.push(["up for", format.span(status.at_s)]);
  const text = pairs.flat().join("\n");
  if (parent.dataset.shown === text) return;
  parent.dataset.shown = text;
  parent.replaceChildren(makeFacts(pairs));
}
