// Numbers, times and sizes for people. What is not known is a dash.

export const NONE = "–";

const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const COMPACT = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

// What would move or hide other text: control characters and marks of direction.
const UNFIT = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]/g;

/** A name that others chose, with unfit characters as their escapes, and not endless. */
export function visible(text, most = 300) {
  const shown = String(text).replace(
    UNFIT,
    (character) => `\\u${character.charCodeAt(0).toString(16).padStart(4, "0")}`,
  );
  return shown.length <= most ? shown : `${shown.slice(0, most - 1)}…`;
}

export function count(value) {
  if (!Number.isFinite(value)) return NONE;
  return Math.abs(value) < 100000 ? WHOLE.format(value) : COMPACT.format(value);
}

/** Per second: three digits are enough. */
export function rate(value) {
  if (!Number.isFinite(value)) return NONE;
  if (value >= 100 || value === 0) return count(value);
  return value >= 10 ? value.toFixed(1) : value.toFixed(2);
}

export function percent(share) {
  if (!Number.isFinite(share)) return NONE;
  if (share > 0 && share < 0.001) return "<0.1%";
  return `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)}%`;
}

/** A time as [number, unit], from µs to minutes. */
export function duration(seconds) {
  if (!Number.isFinite(seconds)) return [NONE, ""];
  if (seconds < 0.001) return [(seconds * 1e6).toFixed(0), "µs"];
  if (seconds < 0.01) return [(seconds * 1e3).toFixed(2), "ms"];
  if (seconds < 0.1) return [(seconds * 1e3).toFixed(1), "ms"];
  if (seconds < 1) return [(seconds * 1e3).toFixed(0), "ms"];
  if (seconds < 100) return [seconds.toFixed(seconds < 10 ? 2 : 1), "s"];
  return [(seconds / 60).toFixed(1), "min"];
}

export function durationText(seconds) {
  return duration(seconds).join("\u00a0").trim();
}

/** How long ago, or for how long: "3 s", "12 min", "4 h 10 min", "3 d 2 h". */
export function span(seconds) {
  if (!Number.isFinite(seconds)) return NONE;
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 60) return `${whole} s`;
  const minutes = Math.floor(whole / 60);
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  if (hours < 24) return `${hours} h ${minutes % 60} min`;
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

export function bytes(value) {
  if (!Number.isFinite(value)) return NONE;
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let power = 0;
  while (value >= 1024 && power < units.length - 1) {
    value /= 1024;
    power += 1;
  }
  return `${value >= 100 || power === 0 ? value.toFixed(0) : value.toFixed(1)} ${units[power]}`;
}

/** FLOP/s and bytes/s: "989 T", "3.4 T". */
export function magnitude(value) {
  if (!Number.isFinite(value)) return NONE;
  const units = ["", "K", "M", "G", "T", "P", "E"];
  let power = 0;
  while (value >= 1000 && power < units.length - 1) {
    value /= 1000;
    power += 1;
  }
  return `${value >= 100 ? value.toFixed(0) : value.toFixed(1)} ${units[power]}`;
}
