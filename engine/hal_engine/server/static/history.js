// What the last two minutes looked like: the server keeps counters only, so the page remembers.

const MOST = 120;

export class History {
  constructor() {
    this.samples = [];
    this.startedAt = null;
  }

  /** Takes a status; false if it is the one that was taken last. */
  add(status) {
    const last = this.samples.at(-1);
    const isOther = this.startedAt !== status.server.started_unix_s;
    if (isOther || (last && status.at_s < last.at_s)) this.samples = []; // another server
    else if (last && status.at_s === last.at_s) return false;
    this.startedAt = status.server.started_unix_s;
    this.samples.push(status);
    if (this.samples.length > MOST) this.samples.shift();
    return true;
  }

  get latest() {
    return this.samples.at(-1) ?? null;
  }

  /** The sample of about `seconds` ago, or the oldest; null if there is only one. */
  before(seconds) {
    const latest = this.latest;
    if (this.samples.length < 2) return null;
    const young = this.samples.findIndex((sample) => sample.at_s > latest.at_s - seconds);
    return this.samples[Math.max(0, Math.min(young, this.samples.length - 1) - 1)];
  }

  /** How fast a counter grew in the last `seconds`; NaN if it is not known. */
  rate(counter, seconds) {
    const earlier = this.before(seconds);
    return earlier === null ? NaN : growth(counter, earlier, this.latest);
  }

  /** The same between each sample and the next. */
  rates(counter) {
    return this.samples.slice(1).map((sample, i) => growth(counter, this.samples[i], sample));
  }

  /** A value of each sample. */
  values(of) {
    return this.samples.map(of);
  }
}

function growth(counter, earlier, later) {
  if (earlier.engine === null || later.engine === null) return NaN;
  const seconds = later.at_s - earlier.at_s;
  return seconds > 0 ? Math.max(0, counter(later) - counter(earlier)) / seconds : NaN;
}
