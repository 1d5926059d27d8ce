// The page: asks for the status each second, and says what is known and what is not.

import { ApiError, Poller, getJson, hasKey, setKey } from "./api.js";
import { CallsView } from "./calls.js";
import { Chat } from "./chat.js";
import { byId, make, setText } from "./dom.js";
import * as format from "./format.js";
import { History } from "./history.js";
import { Overview, showDevices, showProcess, showRequests, showWaivers } from "./overview.js";
import { PlanView } from "./plan.js";

const STALLED_AFTER_S = 10;
const MOST_LINES = 4;

const history = new History();
const overview = new Overview(byId("figures"));
const calls = new CallsView(byId("calls"));
const planView = new PlanView({
  parent: byId("plan"),
  summary: byId("plan-summary"),
  hash: byId("plan-hash"),
  filters: byId("plan-filters"),
  text: byId("plan-filter"),
  tier: byId("plan-tier"),
});
const chat = new Chat({
  form: byId("chat-form"),
  input: byId("chat-input"),
  send: byId("chat-send"),
  stop: byId("chat-stop"),
  clear: byId("chat-clear"),
  log: byId("chat-log"),
  empty: byId("chat-empty"),
  hint: byId("chat-hint"),
  system: byId("chat-system"),
  temperature: byId("chat-temperature"),
  max: byId("chat-max"),
});
const poller = new Poller("/v1/hal/status", { data: onStatus, refused: onRefused, lost: onLost });

let planOf = null; // the server start and hash that the shown plan belongs to
let retryAt = 0;

function onStatus(status) {
  byId("loading").hidden = true;
  byId("key").hidden = true;
  byId("live").hidden = false;
  byId("footer").hidden = false;
  byId("forget-key").hidden = !hasKey();
  document.body.classList.remove("stale");
  setNotice("lost", null);
  if (!history.add(status)) return;
  setState(status.status, status.status);
  const name = format.visible(status.model.id);
  setText(byId("model"), name);
  document.title = `${name} · ${status.status} · halstack`;
  showReasons(status);
  document.body.classList.toggle("stale", status.engine === null);
  overview.show(history);
  calls.show(history);
  showProcess(history);
  showWaivers(byId("waivers"), status);
  showRequests(byId("requests"), status);
  chat.setServer(status);
  setText(byId("footer-server"), `halstack ${format.visible(status.server.version, 40)} · up ${format.span(status.at_s)}`);
  readPlan(status);
}

/** The plan is read once for each server: it does not change while one runs. */
async function readPlan(status) {
  const wanted = `${status.server.started_unix_s} ${status.plan.hash}`;
  if (planOf === wanted) return;
  planOf = wanted;
  try {
    const plan = await getJson("/v1/hal/plan");
    planView.show(plan);
    showDevices(byId("devices"), plan);
    showProcess(history);
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    planOf = null; // with the next status again
    planView.failed(error);
  }
}

function showReasons(status) {
  const { count, in_use: waivers } = status.waivers;
  const lines = waivers.map((waiver) => format.visible(waiver, 1000));
  if (count > waivers.length) lines.push(`and ${format.count(count - waivers.length)} more`);
  const allowed = count === 1 ? "1 waiver allows what is" : `${format.count(count)} waivers allow what is`;
  setNotice("degraded", count > 0 ? `Degraded: ${allowed} below the best path known.` : null, lines);
  setNotice("draining", status.status === "draining" ? "Draining: the server finishes what runs and takes no new requests." : null);
  setNotice("stopped", status.status === "stopped" ? "Stopped: the engine has ended. The server's log says why; it has to be started again." : null);
  setNotice("stalled", isStalled() ? `No step of the engine has ended for ${STALLED_AFTER_S} s, and requests are running.` : null);
}

function isStalled() {
  const earlier = history.before(STALLED_AFTER_S);
  const latest = history.latest;
  if (earlier === null || earlier.engine === null || latest.engine === null) return false;
  return (
    latest.at_s - earlier.at_s >= STALLED_AFTER_S &&
    earlier.engine.running > 0 &&
    latest.engine.running > 0 &&
    earlier.engine.steps === latest.engine.steps
  );
}

function onRefused(error) {
  byId("loading").hidden = true;
  byId("live").hidden = true;
  byId("footer").hidden = true;
  byId("forget-key").hidden = true;
  byId("key").hidden = false;
  setText(byId("key-error"), hasKey() ? error.message : "");
  setKey(null);
  planOf = null;
  setNotice("lost", null);
  setState("locked", "key needed");
  document.title = "halstack";
  byId("key-input").focus();
}

function onLost(error, waitMs) {
  retryAt = Date.now() + waitMs;
  setState("lost", error.status === 0 ? "no connection" : "no answer");
  const isFirst = history.latest === null;
  byId("loading").hidden = !isFirst;
  if (isFirst) setText(byId("loading"), "There is nothing to show yet.");
  document.body.classList.add("stale");
  const age = isFirst ? "" : " The figures below are the last ones that came.";
  setNotice("lost", `${format.visible(error.message, 1000)}${age}`, [], { label: "Try now", run: () => poller.now() });
  chat.setLost();
  countDown();
}

function countDown() {
  const place = document.querySelector("#notice-lost .count");
  if (place === null) return;
  const seconds = Math.max(0, Math.ceil((retryAt - Date.now()) / 1000));
  setText(place, seconds > 0 ? ` Trying again in ${seconds} s.` : " Trying…");
}

function setState(kind, word) {
  byId("state").className = `state ${kind}`;
  setText(byId("state-word"), word);
}

/** Shows, changes or (text null) removes a notice; the same one twice is left alone. */
function setNotice(name, text, lines = [], action = null) {
  const id = `notice-${name}`;
  const old = document.getElementById(id);
  if (text === null) {
    old?.remove();
    return;
  }
  const content = [text, ...lines].join("\n");
  if (old !== null && old.dataset.content === content) return;
  const button = action === null ? null : make("button", { type: "button" }, action.label);
  button?.addEventListener("click", action.run);
  const notice = make(
    "div",
    { class: `notice ${name}`, id, role: name === "lost" || name === "stopped" ? "alert" : "status" },
    make("p", {}, text, make("span", { class: "count", "aria-hidden": "true" }), button === null ? null : " ", button),
    lines.length > 0 ? makeLines(lines) : null,
  );
  notice.dataset.content = content;
  if (old === null) byId("notices").append(notice);
  else old.replaceWith(notice);
}

/** The lines of a notice; many of them are shown on demand. */
function makeLines(lines) {
  const list = make("ul", { class: "lines" }, ...lines.map((line) => make("li", {}, make("bdi", {}, line))));
  return lines.length <= MOST_LINES ? list : make("details", {}, make("summary", {}, "Show all"), list);
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const input = byId("key-input");
  const key = input.value.trim();
  if (!/^[\x21-\x7e]+$/.test(key)) {
    setText(byId("key-error"), "A key is made of printable ASCII characters without spaces.");
    return;
  }
  input.value = "";
  setKey(key);
  poller.start();
});

byId("forget-key").addEventListener("click", () => {
  setKey(null);
  location.reload(); // with the key goes all that it let see
});

for (const name of ["error", "unhandledrejection"]) {
  window.addEventListener(name, () => {
    setNotice("broken", "This page has met an error of its own; reload it. The browser's console says more.");
  });
}

setInterval(countDown, 500);
poller.start();
