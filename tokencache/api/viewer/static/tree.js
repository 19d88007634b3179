// Draws the turns of a session as a graph: one row for each turn in the order of recording, one lane for each sequence. A lane starts at the
// turn from which its sequence branched off (dashed: took its context) and ends with its last turn. The color of a node is how its prompt was
// made. A long run of turns that only continue the turn before is folded to one row. An answer that returned as text in another turn (a link)
// is a dotted line to that turn. A call that failed is a row without a number.

import { badge, h, s } from "./dom.js";
import { clock, count, many, readable, span, visible } from "./format.js";
import { incidentText, LINKS, reasonText, STARTS } from "./words.js";

const ROW = 30;
const LANE = 14;
const STEP = 400; // rows that are built at a time

const MANY = 40; // a session with more turns has long quiet runs folded
const RUN = 6; // fewest turns in a fold

/** `unfolded` holds the ids of the first turns of the folds that the user opened, `links` those of the session. */
export function tree(outline, chosen, unfolded, links) {
  if (!outline.turns.length && !outline.failed_calls.length) return null;
  const lanes = layOut(outline, links);
  const list = h("div", { class: "tree", role: "list", "aria-label": "Turns" });
  const session = `#/session/${encodeURIComponent(outline.session)}`;
  const draw = (entry) => {
    if (entry.kind) return failedRow(entry, lanes);
    if (!Array.isArray(entry)) return turnRow(entry, outline, lanes, session, entry.id === chosen);
    const fold = foldRow(entry, lanes, () => {
      unfolded.add(entry[0].id);
      fold.replaceWith(...entry.map(draw));
    });
    return fold;
  };
  const entries = folded(outline, chosen, unfolded, links);
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

/**
 * The turns of a session, with an array in place of each long run of turns that only continue the turn before, and the calls that failed
 * (`row` is where they are drawn) between them.
 */
function folded(outline, chosen, unfolded, links) {
  const failed = [...outline.failed_calls];
  const few = outline.turns.length <= MANY;
  const left = new Set([...outline.sequences.map((one) => one.from_turn), ...links.flatMap((link) => [link.turn, ...link.sources])]);
  const entries = [];
  let run = [];
  const end = () => {
    if (!run.length) return;
    const open = run.length < RUN || unfolded.has(run[0].id) || run.some((turn) => turn.id === chosen);
    entries.push(...(open ? run : [run]));
    run = [];
  };
  const failedUntil = (time, row) => {
    while (failed.length && failed[0].at <= time) {
      end();
      entries.push({ ...failed.shift(), row });
    }
  };
  for (const [n, turn] of outline.turns.entries()) {
    failedUntil(turn.created + turn.seconds, n - 0.5);
    const quiet = !few && n && turn.match === "continue" && turn.sequence === outline.turns[n - 1].sequence && turn.parent === outline.turns[n - 1].id &&
      !turn.reason && !turn.marks.length && !left.has(turn.id) && n < outline.turns.length - 1;
    if (quiet) {
      run.push(turn);
      continue;
    }
    end();
    entries.push(turn);
  }
  end();
  failedUntil(Infinity, outline.turns.length - 0.5);
  return entries;
}

/** A call that ended without a turn, by the incident that says why. */
function failedRow(one, lanes) {
  return h("div", { role: "listitem", class: "turn-row lost", data: { call: one.call } },
    graph(one.row, null, lanes),
    h("div", { class: "row" },
      h("span", { class: "no" }, "✕"),
      h("span", { class: "what" },
        badge(one.kind, one.hole ? "incomplete" : "incident", incidentText(one.kind)),
        h("span", { class: "says" }, visible(`failed call: ${one.detail}`))),
      h("span", { class: "time" }, clock(one.at))));
}

function foldRow(run, lanes, open) {
  const sampled = run.reduce((sum, turn) => sum + turn.completion_tokens, 0);
  return h("div", { role: "listitem", class: "turn-row fold" },
    graph(run[0].number, null, lanes),
    h("button", { type: "button", class: "row", onclick: open },
      h("span", { class: "no" }, "⋮"),
      h("span", { class: "what" }, `turns ${run[0].number}–${run.at(-1).number}: ${many(run.length, "turn")} that continue, ${count(sampled)} tokens sampled`)));
}

/**
 * For each sequence its lane and its rows: `from` (where it leaves another, or its first), `first`, `last`, `until` (the row of the turn to
 * which its answer is linked; `joins` is that turn's sequence). `linked` has the links of each turn by its id.
 */
function layOut(outline, links) {
  const number = new Map(outline.turns.map((turn) => [turn.id, turn.number]));
  const lines = outline.sequences.map((one) => ({ one, first: number.get(one.id), last: 0, lane: 0 }));
  for (const turn of outline.turns) lines[turn.sequence].last = turn.number;
  const linked = new Map();
  for (const link of links) {
    const to = outline.turns[number.get(link.turn)];
    const from = link.sources.map((id) => outline.turns[number.get(id)]);
    if (!to || from.includes(undefined)) continue; // the outline is older than the links
    linked.set(to.id, [...(linked.get(to.id) ?? []), { ...link, from }]);
    const line = lines[from[0].sequence];
    if (from.length === 1 && line.until === undefined && line.last === from[0].number) Object.assign(line, { until: to.number, joins: to.sequence });
  }
  const busy = []; // by lane: the row after which it is free
  for (const line of [...lines].sort((a, b) => a.first - b.first)) {
    line.from = line.one.from_turn === null ? line.first : number.get(line.one.from_turn);
    line.leaves = line.one.from_turn === null ? null : outline.turns[line.from].sequence;
    line.lane = busy.findIndex((until) => until < line.from);
    if (line.lane < 0) line.lane = busy.length;
    busy[line.lane] = line.until ?? line.last;
  }
  // lanes are assigned in the order of first rows, so that a sequence never gets a lane that is still in use
  return { lines, linked, width: Math.max(busy.length, 1) };
}

function graph(row, turn, { lines, width }) {
  const x = (lane) => LANE / 2 + 2 + lane * LANE;
  const parts = [];
  for (const line of lines) {
    if (row < line.from || row > (line.until ?? line.last)) continue;
    const at = x(line.lane);
    const link = (d) => parts.push(s("path", { d, class: "edge link" }));
    if (row > line.last) {
      const target = x(lines[line.joins].lane);
      link(row === line.until ? `M${at} 0 C${at} ${ROW / 2} ${target} 0 ${target} ${ROW / 2}` : `M${at} 0 V${ROW}`);
      continue;
    }
    if (row === line.last && line.until !== undefined) link(`M${at} ${ROW / 2} V${ROW}`);
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
  const returned = (lanes.linked.get(turn.id) ?? []).map((link) =>
    badge(`${link.kind} ← ${link.from.map((one) => one.number).join(" or ")}`, "link", `message ${link.message} holds this answer: ${LINKS[link.kind] ?? ""}`));
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
        starts && turn.agent?.parent ? badge("sub-agent", "agent", `agent ${readable(turn.agent.id)}, started by ${readable(turn.agent.parent)}: so the harness says`) : null,
        returned, fate, marks, rules,
        h("span", { class: "says" }, visible(turn.says) || "∅")),
      h("span", { class: "num", title: "prompt tokens" }, count(turn.prompt_tokens)),
      h("span", { class: "num plus", title: "sampled tokens" }, `+${count(turn.completion_tokens)}`),
      h("span", { class: "finish" }, turn.finish_reason ?? ""),
      h("span", { class: "time", title: `took ${span(turn.seconds)}` }, clock(turn.created)),
      h("span", { class: "took" }, span(turn.seconds))),
    h("a", { class: "tokens", href: `${session}/sequence/${encodeURIComponent(outline.sequences[turn.sequence].id)}?token=${turn.prompt_tokens}`, title: "show its tokens", "aria-label": `tokens of turn ${turn.number}` }, "tokens"));
}
