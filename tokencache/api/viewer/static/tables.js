// Draws the tables of sequences, of incidents, and of turns for which rules were applied.

import { badge, copier, h } from "./dom.js";
import { clock, count, many, moment, readable, reward, share, visible } from "./format.js";
import { incidentText, reasonText, STARTS } from "./words.js";

const to = (outline, ...rest) => `#/session/${[outline.session, ...rest].map(encodeURIComponent).join("/")}`;

function table(name, heads, rows) {
  for (const row of rows) for (const [n, cell] of [...row.cells].entries()) cell.dataset.label = n ? heads[n].replace("#", "") : "";
  return rows.length ? h("table", { class: "list", "aria-label": name }, tableHead(heads), h("tbody", {}, rows)) : null;
}

/** The head of a table. `#` before a name marks a column of numbers. */
export const tableHead = (heads) =>
  h("thead", {}, h("tr", {}, heads.map((head) => h("th", { scope: "col", class: head.startsWith("#") ? "num" : null }, head.replace("#", "")))));

/** A link with the number of a turn, which opens it. */
const turnLink = (outline, turn, first = false) =>
  turn ? h("a", { class: first ? "first" : null, href: to(outline, "turn", turn.id) }, `turn ${turn.number}`) : null;

export function sequenceTable(outline) {
  const several = new Set(outline.sequences.map((one) => one.model)).size > 1;
  return table("Sequences", ["sequence", ...(several ? ["model"] : []), "start", "reason", "from", "#turns", "#tokens", "#trainable", "#reward", "", ""], outline.sequences.map((one) => {
    const from = one.from_turn ? outline.turns.find((turn) => turn.id === one.from_turn) : null;
    return h("tr", { class: one.continued || one.turns > 1 ? null : "dim" },
      h("td", {}, h("a", { class: "first", href: to(outline, "sequence", one.id) }, `sequence ${one.number}`), copier(one.id, "the sequence's id")),
      several ? h("td", {}, readable(one.model)) : null,
      h("td", {}, badge(one.start, one.start, STARTS[one.start])),
      h("td", { title: one.reason ? reasonText(one.reason) : null }, one.reason),
      h("td", {}, one.parent === null ? "" : [h("span", { class: "muted" }, `sequence ${one.parent} · `), turnLink(outline, from)]),
      h("td", { class: "num" }, count(one.turns)),
      h("td", { class: "num" }, count(one.tokens)),
      h("td", { class: "num" }, count(one.trainable_tokens), h("small", {}, ` ${share(one.trainable_tokens, one.tokens)}`)),
      h("td", { class: "num" }, one.reward === null ? "" : reward(one.reward)),
      h("td", {}, one.continued ? "" : h("span", { class: "muted" }, "not continued")),
      h("td", {}, one.tools ? h("span", { class: "muted" }, many(one.tools, "tool")) : h("span", { class: "muted" }, "no tools")));
  }));
}

export function incidentTable(outline) {
  const byCall = new Map(outline.turns.map((turn) => [turn.call, turn]));
  return table("Incidents", ["incident", "", "when", "turn", "detail", "call"], outline.incidents.map((one) => {
    const turn = outline.turns.find((known) => known.id === one.turn) ?? byCall.get(one.call);
    return h("tr", {},
      h("td", {}, badge(one.kind, one.hole ? "incomplete" : "incident", incidentText(one.kind))),
      h("td", {}, one.hole ? h("span", { class: "hole" }, "data is missing") : h("span", { class: "muted" }, "no data is missing")),
      h("td", { title: moment(one.at) }, one.at ? clock(one.at) : ""),
      h("td", {}, turnLink(outline, turn, true)),
      h("td", { class: "detail" }, visible(one.detail)),
      h("td", {}, one.call ? h("span", { class: "id" }, h("code", {}, one.call.slice(0, 12)), copier(one.call, "the call's id")) : null));
  }));
}

export function ruleTable(outline) {
  const turns = outline.turns.filter((turn) => turn.forgiven.length);
  return table("Applied rules", ["turn", "match", "applied rules", "harness", "its reply"], turns.map((turn) =>
    h("tr", {},
      h("td", {}, turnLink(outline, turn, true)),
      h("td", {}, badge(turn.match, turn.match, STARTS[turn.match])),
      h("td", {}, turn.forgiven.map((rule) => badge(rule, "rule"))),
      h("td", { class: "short" }, turn.harness || h("span", { class: "muted" }, "unnamed")),
      h("td", { class: "detail" }, visible(turn.says)))));
}
