// Formats numbers, times and texts for display.

const COUNT = new Intl.NumberFormat("en");

/** A whole number with thousands separators. */
export const count = (n) => COUNT.format(n);

/** `1 turn`, `2 turns`. */
export const many = (n, word) => `${count(n)} ${word}${n === 1 ? "" : "s"}`;

/** A reward, or another value, with at most four significant digits. */
export const reward = (value) => (value === null ? "–" : String(Number(value.toPrecision(4))));

/** A share in percent. */
export const share = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(part && part / whole < 0.1 ? 1 : 0)} %` : "–");

/** Seconds in one unit, or two. */
export function span(seconds) {
  if (seconds < 0.9995) return `${Math.max(0, Math.round(seconds * 1000))} ms`;
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
  if (seconds < 172800) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86400)} days`;
}

/** How long ago, rounded. */
export function ago(seconds) {
  if (seconds < 2) return "now";
  if (seconds < 60) return `${Math.floor(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 172800) return `${Math.floor(seconds / 3600)} h`;
  return `${Math.floor(seconds / 86400)} d`;
}

/** A time (Unix time in seconds) as local date and time. */
export function moment(seconds) {
  const date = new Date(seconds * 1000);
  const two = (n) => String(n).padStart(2, "0");
  return (
    `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ` +
    `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`
  );
}

/** The time of day, to the second. */
export const clock = (seconds) => moment(seconds).slice(11);

// control characters, and characters that change the text direction or have no width: shown by their code, so that nothing is hidden
const HIDDEN = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;

/** A text with invisible characters made visible. Line breaks stay line breaks. */
export const visible = (text) => readable(text.replace(/\r/g, "␍").replace(/\n/g, "↵\n").replace(/\t/g, "⇥\t"));

/** The same, but line breaks and tabs are not marked: for reading. */
export const readable = (text) =>
  text
    .replace(/\r\n?/g, "\n")
    .replace(HIDDEN, (c) => `⟨${c.codePointAt(0).toString(16).padStart(4, "0")}⟩`);

/** A text in one line, in quotes; or any value, as JSON. */
export const quoted = (value) => JSON.stringify(value).replace(HIDDEN, (c) => `\\u${c.codePointAt(0).toString(16).padStart(4, "0")}`);

/** A log probability and its probability. */
export const chance = (value) => `${value.toFixed(4)}  (p ${Math.exp(value) < 0.0005 ? Math.exp(value).toExponential(1) : Math.exp(value).toFixed(3)})`;
