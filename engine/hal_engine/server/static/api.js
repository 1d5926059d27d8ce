// Talking to the server: the key, errors in words, and the poll with its back-off.

const KEY_NAME = "halstack.key";
const TIMEOUT_MS = 10000;
const POLL_MS = 1000;
const BACK_OFF_MS = [1000, 2000, 4000, 8000, 15000, 30000];

let apiKey = readKey();

function readKey() {
  try {
    return sessionStorage.getItem(KEY_NAME);
  } catch {
    return null; // a browser that keeps nothing: the key lasts until the page is left
  }
}

export function hasKey() {
  return apiKey !== null;
}

/** Keeps the key for this tab only; null forgets it. */
export function setKey(key) {
  apiKey = key;
  try {
    if (key === null) sessionStorage.removeItem(KEY_NAME);
    else sessionStorage.setItem(KEY_NAME, key);
  } catch {
    return; // see readKey
  }
}

/** An answer that is no success. `status` is 0 where none came. */
export class ApiError extends Error {
  constructor(status, message, retryAfterS = null) {
    super(message);
    this.status = status;
    this.retryAfterS = retryAfterS;
  }
}

/** fetch with the key. Raises ApiError for every answer but 2xx, and where none comes. */
export async function request(path, options = {}) {
  const headers = { accept: "application/json", ...options.headers };
  if (apiKey !== null) headers.authorization = `Bearer ${apiKey}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    const isLate = error.name === "TimeoutError";
    throw new ApiError(0, isLate ? "The server does not answer." : "The server cannot be reached.");
  }
  if (response.ok) return response;
  throw await errorOf(response);
}

/** A document; waits no longer than ten seconds. */
export async function getJson(path) {
  const response = await request(path, { signal: AbortSignal.timeout(TIMEOUT_MS) });
  try {
    return await response.json();
  } catch {
    throw new ApiError(0, "The server's answer broke off or is no JSON.");
  }
}

async function errorOf(response) {
  let message = "";
  try {
    message = (await response.json()).error.message;
  } catch {
    message = ""; // something between this page and the server answered
  }
  const retry = Number(response.headers.get("retry-after"));
  return new ApiError(
    response.status,
    typeof message === "string" && message !== "" ? message : wordsOf(response.status),
    retry > 0 ? retry : null,
  );
}

function wordsOf(status) {
  if (status === 401) return "The API key is missing or not right.";
  if (status === 404) return "The server does not know this address; it may be another version.";
  if (status === 429) return "Too many requests wait. Try again later.";
  if (status === 503) return "The server is not available now.";
  return `The server answered with status ${status}.`;
}

/**
 * Asks for `path` each second while the page is seen, and less often while nothing answers.
 * `on.data(document)`, `on.refused(error)` for 401, which ends it until `start`,
 * `on.lost(error, waitMs)` for anything else.
 */
export class Poller {
  constructor(path, on) {
    this.path = path;
    this.on = on;
    this.failures = 0;
    this.timer = null;
    this.isRunning = false;
    this.isAsking = false;
    document.addEventListener("visibilitychange", () => {
      if (!document.hidden && this.isRunning && !this.isAsking) this.now();
    });
  }

  start() {
    this.isRunning = true;
    this.failures = 0;
    this.now();
  }

  /** Asks at once. */
  now() {
    clearTimeout(this.timer);
    if (!this.isAsking) this.ask();
  }

  async ask() {
    this.isAsking = true;
    let waitMs = POLL_MS;
    try {
      const document_ = await getJson(this.path);
      this.failures = 0;
      this.on.data(document_);
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      if (error.status === 401) {
        this.isRunning = false;
        this.on.refused(error);
        return;
      }
      waitMs = BACK_OFF_MS[Math.min(this.failures, BACK_OFF_MS.length - 1)];
      this.failures += 1;
      this.on.lost(error, waitMs);
    } finally {
      this.isAsking = false;
    }
    this.timer = setTimeout(() => {
      if (!document.hidden) this.now();
    }, waitMs);
  }
}
