// The chat box: a conversation with the model, streamed. It lives in this page only.

import { ApiError, request } from "./api.js";
import { make, setText } from "./dom.js";
import * as format from "./format.js";

const REASONS = { stop: "complete", length: "ended at the most tokens", content_filter: "filtered" };

export class Chat {
  constructor({ form, input, send, stop, clear, log, empty, hint, system, temperature, max }) {
    Object.assign(this, { form, input, send, stop, clear, log, empty, hint, system, temperature, max });
    this.turns = []; // {role, content} of what is sent along
    this.model = null;
    this.aborter = null;
    this.cannot = "the server has not answered yet";
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.submit();
    });
    input.addEventListener("keydown", (event) => {
      const isPlain = !event.shiftKey && !event.isComposing;
      if (event.key === "Enter" && isPlain) {
        event.preventDefault();
        this.submit();
      }
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.aborter !== null) this.aborter.abort();
    });
    stop.addEventListener("click", () => this.aborter?.abort());
    clear.addEventListener("click", () => this.reset());
  }

  /** Tells which model answers, and why not, if it cannot now. */
  setServer(status) {
    this.model = status.model;
    this.cannot = { draining: "The server is ending.", stopped: "The engine has stopped." }[status.status] ?? null;
    const isChat = status.model.has_chat_template;
    const lines = [
      this.cannot,
      isChat ? null : "This model has no chat template: it continues your text, and knows no turns.",
    ].filter((line) => line !== null);
    setText(this.hint, lines.join(" "));
    this.hint.hidden = lines.length === 0;
    this.system.disabled = !isChat;
    this.update();
  }

  setLost() {
    this.cannot = "There is no connection to the server.";
    this.update();
  }

  update() {
    const isBusy = this.aborter !== null;
    this.send.hidden = isBusy;
    this.stop.hidden = !isBusy;
    this.send.disabled = this.cannot !== null;
    this.send.title = this.cannot ?? "";
    this.clear.disabled = isBusy || this.log.querySelector(".turn") === null;
  }

  reset() {
    this.turns = [];
    this.log.replaceChildren(this.empty);
    this.update();
    this.input.focus();
  }

  async submit() {
    const text = this.input.value;
    if (text.trim() === "" || this.aborter !== null || this.cannot !== null) return;
    const sampling = this.readSampling();
    if (sampling === null) return;
    this.empty.remove();
    this.addTurn("user", text);
    this.input.value = "";
    const answer = new Answer(this.addTurn("assistant", ""), this.log);
    this.aborter = new AbortController();
    this.update();
    if (document.activeElement !== this.input) this.stop.focus({ preventScroll: true });
    const wasSent = await this.generate(text, sampling, answer);
    this.aborter = null;
    this.update();
    if (wasSent) {
      this.turns.push({ role: "user", content: text }, { role: "assistant", content: answer.text });
    } else if (this.input.value === "") {
      this.input.value = text; // to try again
    }
    if (document.activeElement === document.body) this.send.focus({ preventScroll: true });
  }

  /** The numbers of the options, or null after pointing at a wrong one. */
  readSampling() {
    for (const field of [this.temperature, this.max]) {
      if (field.value === "" || !field.checkValidity()) {
        field.closest("details").open = true;
        field.reportValidity();
        field.focus();
        return null;
      }
    }
    return { temperature: Number(this.temperature.value), max_tokens: Number(this.max.value) };
  }

  /** Whether there is an answer, whole or stopped by the user. */
  async generate(text, sampling, answer) {
    try {
      const response = await request(...this.post(text, sampling));
      await readEvents(response.body, (event) => answer.take(event));
      answer.finish();
      return true;
    } catch (error) {
      if (error.name === "AbortError") {
        answer.finish("stopped by you");
        return answer.text !== "";
      }
      if (error instanceof ApiError) answer.fail(explain(error));
      else if (error instanceof SyntaxError) answer.fail("The server sent what is no event of a chat.");
      else if (error instanceof TypeError) answer.fail("The connection broke before the answer was complete.");
      else throw error;
      return false;
    }
  }

  post(text, sampling) {
    const isChat = this.model.has_chat_template;
    const system = this.system.value.trim();
    const messages = [
      ...(system === "" ? [] : [{ role: "system", content: system }]),
      ...this.turns,
      { role: "user", content: text },
    ];
    const body = {
      model: this.model.id,
      ...(isChat ? { messages } : { prompt: text }),
      ...sampling,
      stream: true,
      stream_options: { include_usage: true },
    };
    return [
      isChat ? "/v1/chat/completions" : "/v1/completions",
      {
        method: "POST",
        headers: { "content-type": "application/json", accept: "text/event-stream" },
        body: JSON.stringify(body),
        signal: this.aborter.signal,
      },
    ];
  }

  addTurn(role, text) {
    const name = role === "user" ? "You" : "Model";
    const body = make("div", { class: "text", dir: "auto" }, text);
    const turn = make("article", { class: `turn ${role}` }, make("h3", {}, name), body);
    this.log.append(turn);
    this.log.scrollTop = this.log.scrollHeight;
    return turn;
  }
}

/** One answer as it comes. */
class Answer {
  constructor(turn, log) {
    this.turn = turn;
    this.log = log;
    this.body = turn.querySelector(".text");
    this.caption = make("p", { class: "caption" }, "waiting for the first token…");
    turn.append(this.caption);
    turn.setAttribute("aria-busy", "true");
    this.text = "";
    this.startedMs = performance.now();
    this.firstMs = null;
    this.lastMs = null;
    this.numPieces = 0;
    this.numTokens = null;
    this.reason = null;
  }

  take(event) {
    if (event.error) throw new ApiError(0, String(event.error.message));
    if (event.usage) this.numTokens = event.usage.completion_tokens;
    for (const choice of event.choices ?? []) {
      const piece = choice.delta?.content ?? choice.text ?? "";
      if (piece !== "") this.append(piece);
      if (choice.finish_reason) this.reason = choice.finish_reason;
    }
  }

  append(piece) {
    const now = performance.now();
    this.firstMs ??= now;
    this.lastMs = now;
    this.numPieces += 1;
    this.text += piece;
    const isAtEnd = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 40;
    this.body.append(piece); // a text node
    if (isAtEnd) this.log.scrollTop = this.log.scrollHeight;
    setText(this.caption, this.figures());
  }

  /** "first token after 80 ms · 34.5 tok/s · 128 tokens" */
  figures() {
    if (this.firstMs === null) return "";
    const tokens = this.numTokens ?? this.numPieces;
    const parts = [`first token after ${format.durationText((this.firstMs - this.startedMs) / 1000)}`];
    const seconds = (this.lastMs - this.firstMs) / 1000;
    if (tokens > 1 && seconds > 0) parts.push(`${format.rate((tokens - 1) / seconds)} tok/s`);
    parts.push(`${format.count(tokens)} ${tokens === 1 ? "token" : "tokens"}`);
    return parts.join(" · ");
  }

  finish(why = null) {
    this.body.normalize();
    this.turn.removeAttribute("aria-busy");
    if (this.text === "" && why === null) this.body.append(make("em", {}, "The model ended without a word."));
    const words = why ?? REASONS[this.reason] ?? "";
    setText(this.caption, [this.figures(), words].filter(Boolean).join(" · "));
    this.log.scrollTop = this.log.scrollHeight;
  }

  fail(message) {
    this.finish("not complete");
    this.turn.append(make("p", { class: "error", role: "alert" }, message));
    this.log.scrollTop = this.log.scrollHeight;
  }
}

function explain(error) {
  const words = format.visible(error.message, 1000);
  return error.retryAfterS === null ? words : `${words} It suggests to try again in ${format.span(error.retryAfterS)}.`;
}

/** Calls `take` with each event's document. Raises ApiError if the stream ends before `[DONE]`. */
async function readEvents(body, take) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new ApiError(0, "The connection ended before the answer did.");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") {
        await reader.cancel();
        return;
      }
      take(JSON.parse(data));
    }
  }
}
