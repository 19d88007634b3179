// Draws tokens as text: each is a small box in the color of its kind. The margin shows the runs.

import { h } from "./dom.js";
import { count, visible } from "./format.js";
import { KINDS } from "./words.js";

const HEAT = [0.9, 0.7, 0.5, 0.3, 0.1, 0.03, 0.01]; // probabilities; the last class is below the last one

/** How unlikely a sampled token was: 0 (likely) to 7. */
export const heat = (logprob) => HEAT.filter((p) => Math.exp(logprob) < p).length;

/** The index of the run that holds a token (runs are sorted and have no gaps). */
export function runAt(runs, token) {
  let low = 0;
  let high = runs.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (runs[middle].start <= token) low = middle;
    else high = middle - 1;
  }
  return low;
}

/**
 * Draw a block's tokens.
 *
 * `tokens` is {start, end, ids, logprobs, texts}; `runs` those of the whole sequence; `sites` where a plain rendering differs,
 * sorted; `media` the images of the sequence, each drawn as one box; `turn(id)` gives a link to a turn.
 */
export function drawTokens(tokens, runs, sites, media, turn) {
  const drawn = [];
  const differs = marker(sites, tokens.start);
  for (let n = runAt(runs, tokens.start); n < runs.length && runs[n].start < tokens.end; n += 1) {
    const run = runs[n];
    const from = Math.max(run.start, tokens.start);
    const to = Math.min(run.end, tokens.end);
    const text = h("div", { class: `text${tokens.texts ? "" : " ids"}` });
    for (let i = from; i < to; i += 1) {
      const medium = mediumAt(media, i);
      text.append(medium ? placeholder(medium, i, run.kind) : token(tokens, i, run.kind, differs(i)));
      if (medium) i = Math.min(to, medium.start + medium.length) - 1;
    }
    const begins = from === run.start;
    drawn.push(h("div", { class: `run k-${run.kind}${begins ? " begins" : ""}` },
      h("div", { class: "margin" },
        begins ? [h("span", { class: "kind", title: KINDS[run.kind][1] }, KINDS[run.kind][0]), turn(run.turn)] : null,
        h("span", { class: "place", title: `from token ${from}` }, count(from))),
      text));
  }
  return drawn;
}

/** The image or other medium that a token is a part of. */
export const mediumAt = (media, i) => media.find(({ start, length }) => start <= i && i < start + length);

/** All tokens of a medium as one box; in the block after a boundary, those that follow. */
function placeholder({ modality, start, length, sha256 }, i, kind) {
  const text = `${modality}, ${count(length)} ${length === 1 ? "token" : "tokens"}${i > start ? " (continued)" : ""}`;
  return h("span", { class: `t medium k-${kind}`, id: `t${i}`, data: { i }, title: sha256 ? `SHA-256 ${sha256}` : "by URL" }, text);
}

function token(tokens, i, kind, site) {
  const at = i - tokens.start;
  const text = tokens.texts ? tokens.texts[at] : String(tokens.ids[at]);
  const logprob = tokens.logprobs[at];
  const classes = ["t", `k-${kind}`];
  if (i % 2) classes.push("odd");
  if (text === null) classes.push("part");
  if (logprob !== null) classes.push(`p${heat(logprob)}`);
  if (site) classes.push(site.start === site.end ? "instead" : "differs");
  return h("span", { class: classes.join(" "), id: `t${i}`, data: { i } }, text === null ? "·" : text === "" ? "∅" : visible(text));
}

/** A function that returns the site of a token. Call it for ascending tokens. An empty site is marked at the token after it. */
function marker(sites, from) {
  let n = sites.findIndex((site) => Math.max(site.end, site.start + 1) > from);
  if (n < 0) n = sites.length;
  return (i) => {
    while (n < sites.length && Math.max(sites[n].end, sites[n].start + 1) <= i) n += 1;
    return n < sites.length && sites[n].start <= i ? sites[n] : null;
  };
}
