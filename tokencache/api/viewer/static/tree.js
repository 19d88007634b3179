// Draws the turns of a session as a graph: one row for each turn in the order of recording, one lane for each sequence. A lane starts at the
// turn from which its sequence branched off (dashed: took its context) and ends with its last turn. The color of a node is how its prompt was
// made. A long run of turns that only continue the turn before is folded to one row.

import { badge, h, s } from "./dom.js";
import { clock, count, many, span, visible } from "./format.js";
import { reasonText, STARTS } from "./words.js";

const ROW = 30;
const LANE = 14;
const STEP = 400; // rows that are built at a time

const MANY = 40; // a session with more turns has long quiet runs folded
const RUN = 6; // fewest turns in a fold

/** `unfolded` holds the ids of the first turns of the folds that the user opened. */
export function tree(outline, chosen, unfolded) {
  if (!outline.turns.length) return null;
  const lanes = layOut(outline);
  const list = h("div", { class: "tree", role: "list", "aria-label": "Turns" });
  const session = `#/session/${encodeURIComponent(outline.session)}`;
  const draw = (entry) => {
    if (!Array.isArray(entry)) return turnRow(entry, outline, lanes, session, entry.id === chosen);
    const fold = foldRow(entry, lanes, () => {
      unfolded.add(entry[0].id);
      fold.replaceWith(...entry.map(draw));
    });
    return fold;
  };
  const entries = folded(outline, chosen, unfolded);
  let next = Math.max(STEP, entries.findIndex((entry) => entry.id === chosen) + 1);
  list.append(...entries.slice(0, next).map(draw));
  if (entries.length > next) {
    const more = h("button", { type: "button", class: "more" });
    const label = () => (more.textContent = `${count(entries.length - next)} more rows`);
    more.addEventListener("click", () => {
      more.before(...entries.slice(next, next + STEP).map(draw));
      next += STEP;
      if (next < entries.length) label();
      else more.remove();
    });
    label();
    list.append(more);
  }
  return list;
}

/** The turns of a session, with an array in place of each long run of turns that only continue the turn before. */
function folded(outline, chosen, unfolded) {
  if (outline.turns.length <= MANY) return outline.turns;
  const left = new Set(outline.sequences.map((one) => one.from_turn));
  const entries = [];
  let run = [];
  const end = () => {
    const open = run.length < RUN || unfolded.has(run[0].id) || run.some((turn) => turn.id === chosen);
    entries.push(...(open ? run : [run]));
    run = [];
  };
  for (const [n, turn] of outline.turns.entries()) {
    const quiet = n && turn.match === "continue" && turn.sequence === outline.turns[n - 1].sequence && turn.parent === outline.turns[n - 1].id &&
      !turn.reason && !turn.marks.length && !left.has(turn.id) && n < outline.turns.length - 1;
    if (quiet) {
      run.push(turn);
      continue;
    }
    end();
    entries.push(turn);
  }
  end();
  return entries;
}

function foldRow(run, lanes, open) {
  const sampled = run.reduce((sum, turn) => sum + turn.completion_tokens, 0);
  return h("div", { role: "listitem", class: "turn-row fold" },
    graph(run[0].number, null, lanes),
    h("button", { type: "button", class: "row", onclick: open },
      h("span", { class: "no" }, "⋮"),
      h("span", { class: "what" }, `turns ${run[0].number}–${run.at(-1).number}: ${many(run.length, "turn")} that continue, ${count(sampled)} tokens sampled`)));
}

/** For each sequence its lane and its rows: `from` (where it leaves another, or its first), `first`, `last`. */
function layOut(outline) {
  const number = new Map(outline.turns.map((turn) => [turn.id, turn.number]));
  const lines = outline.sequences.map((one) => ({ one, first: number.get(one.id), last: 0, lane: 0 }));
  for (const turn of outline.turns) lines[turn.sequence].last = turn.number;
  const busy = []; // by lane: the row after which it is free
  for (const line of [...lines].sort((a, b) => a.first - b.first)) {
    line.from = line.one.from_turn === null ? line.first : number.get(line.one.from_turn);
    line.leaves = line.one.from_turn === null ? null : outline.turns[line.from].sequence;
    line.lane = busy.findIndex((until) => until < line.from);
    if (line.lane < 0) line.lane = busy.length;
    busy[line.lane] = line.last;
  }
  // lanes are assigned in the order of first rows, so that a sequence never gets a lane that is still in use
  return { lines, width: busy.length };
}

function graph(row, turn, { lines, width }) {
  const x = (lane) => LANE / 2 + 2 + lane * LANE;
  const parts = [];
  for (const line of lines) {
    if (row < line.from || row > line.last) continue;
    const at = x(line.lane);
    const loose = row < line.first || (row === line.first && line.from < line.first);
    const dashed = loose && line.one.start !== "branch";
    const draw = (d, dash) => parts.push(s("path", { d, class: `edge${dash ? " dashed" : ""}` }));
    if (row === line.from && line.from < line.first) {
      const origin = x(lines[line.leaves].lane);
      draw(`M${origin} ${ROW / 2} C${origin} ${ROW} ${at} ${ROW / 2} ${at} ${ROW}`, dashed);
      continue;
    }
    if (row > line.from) draw(`M${at} 0 V${ROW / 2}`, dashed);
    if (row < line.last) draw(`M${at} ${ROW / 2} V${ROW}`, row < line.first && dashed);
  }
  if (turn !== null) {
    parts.push(s("circle", { cx: x(lines[turn.sequence].lane), cy: ROW / 2, r: turn.sequence === 0 || turn.continued ? 4.5 : 4, class: `node f-${turn.match}` }));
  }
  const across = x(width - 1) + LANE / 2 + 2;
  return s("svg", { width: across, height: ROW, viewBox: `0 0 ${across} ${ROW}`, class: "graph", "aria-hidden": "true" }, parts);
}

function turnRow(turn, outline, lanes, session, chosen) {
  const starts = outline.sequences[turn.sequence].id === turn.id;
  const fate = turn.thrown_away ? badge("discarded", "away", "the harness continued with another answer to the same messages") : null;
  const marks = turn.marks.map((mark) => badge(mark, "mark"));
  const rules = turn.forgiven.length
    ? badge(turn.forgiven.length > 1 ? `${turn.forgiven[0]} +${turn.forgiven.length - 1}` : turn.forgiven[0], "rule", `applied rules: ${turn.forgiven.join(", ")}`)
    : null;
  return h("div", { role: "listitem", class: `turn-row${turn.thrown_away ? " dim" : ""}${starts ? " starts" : ""}${chosen ? " chosen" : ""}`, data: { turn: turn.id } },
    graph(turn.number, turn, lanes),
    h("a", { class: "row", href: `${session}/turn/${encodeURIComponent(turn.id)}`, "aria-current": chosen ? "true" : null },
      h("span", { class: "no" }, String(turn.number)),
      h("span", { class: "what" },
        starts || turn.match !== "continue" ? badge(turn.match, turn.match, STARTS[turn.match]) : null,
        turn.reason ? h("span", { class: "reason", title: reasonText(turn.reason) }, turn.reason) : null,
        fate, marks, rules,
        h("span", { class: "says" }, visible(turn.says) || "∅")),
      h("span", { class: "num", title: "prompt tokens" }, count(turn.prompt_tokens)),
      h("span", { class: "num plus", title: "sampled tokens" }, `+${count(turn.completion_tokens)}`),
      h("span", { class: "finish" }, turn.finish_reason ?? ""),
      h("span", { class: "time", title: `took ${span(turn.seconds)}` }, clock(turn.created)),
      h("span", { class: "took" }, span(turn.seconds))),
    h("a", { class: "tokens", href: `${session}/sequence/${encodeURIComponent(outline.sequences[turn.sequence].id)}?token=${turn.prompt_tokens}`, title: "show its tokens", "aria-label": `tokens of turn ${turn.number}` }, "tokens"));
}
