// Draws the panel of one turn: how its prompt was built, the replies in its history next to those that were served, and its own reply.

import { at, get } from "./api.js";
import { badge, copier, h, idText, note } from "./dom.js";
import { count, many, moment, quoted, readable, reward, span, visible } from "./format.js";
import { reasonText, STARTS, VERDICTS } from "./words.js";

export class TurnPanel {
  constructor(page, signal) {
    Object.assign(this, { page, signal, id: null });
    this.element = h("aside", { class: "panel", "aria-label": "Turn" });
  }

  /** Show the turn with an id, with its entry of the outline; `null` shows none. */
  async show(id, line) {
    if (id === this.id) return;
    this.id = id;
    this.element.replaceChildren();
    if (id === null) return;
    try {
      const turn = await get(at(this.page.name, "turns", id), {}, this.signal);
      if (this.id === id) this.element.replaceChildren(...this.build(turn, line ?? this.page.turns.get(id)));
    } catch (why) {
      if (why.name !== "AbortError" && this.id === id) this.element.replaceChildren(note(why.message));
    }
  }

  build(turn, line) {
    const { outline } = this.page;
    const session = `#/session/${encodeURIComponent(this.page.name)}`;
    const other = (id) => {
      const known = id && this.page.turns.get(id);
      return known ? h("a", { href: `${session}/turn/${encodeURIComponent(id)}` }, `turn ${known.number}`) : id;
    };
    const next = outline.turns.filter((one) => one.parent === turn.turn);
    const sequence = outline.sequences[line.sequence];
    return [
      h("div", { class: "bar" },
        h("h2", {}, `Turn ${turn.number}`), copier(turn.turn, "the turn's id"), badge(turn.match, turn.match),
        h("span", { class: "grow" }),
        h("a", { class: "button", href: `${session}/sequence/${encodeURIComponent(sequence.id)}?token=${turn.prompt_tokens}` }, "tokens"),
        h("a", { class: "button quiet", href: this.page.href("turns"), "aria-label": "Close the turn", title: "Close (Esc)" }, "×")),
      ...this.changed(turn),
      h("p", { class: "why" }, STARTS[turn.match], "."),
      turn.reason ? h("p", { class: "why strong" }, h("code", {}, turn.reason), " ", reasonText(turn.reason), ".") : null,
      facts([
        ["from", turn.parent ? other(turn.parent) : turn.origin ? ["context of ", other(turn.origin)] : null],
        ["then", next.length ? next.flatMap((one, i) => [i ? ", " : "", other(one.id)]) : line.thrown_away ? "discarded: the harness continued with another answer to the same messages" : "not continued"],
        ["sequence", h("a", { href: `${session}/sequence/${encodeURIComponent(sequence.id)}` }, `sequence ${sequence.number}`)],
        ["tokens", `${count(turn.prompt_tokens)} in the prompt, ${count(turn.completion_tokens)} sampled`],
        ["reward", turn.reward === null ? null : reward(turn.reward)],
        ["finish", [turn.finish_reason, turn.stop_reason === null ? "" : ` (${turn.stop_reason})`]],
        ["called", `${moment(turn.created)}, took ${span(turn.seconds)}`],
        ["request", [many(turn.messages, "message"), ", ", many(turn.tools, "tool"), ", ", turn.dialect, turn.stream ? ", streamed" : ""]],
        ["harness", turn.harness],
        ["agent", turn.agent && agentText(turn.agent)],
        ["model", readable(turn.model)],
        ["sampling", Object.keys(turn.sampling).length ? h("code", {}, quoted(turn.sampling)) : null],
        ["replaced", Object.keys(turn.replaced).length ? [h("code", {}, quoted(turn.replaced)), " requested by the harness"] : null],
        ["log probs", turn.logprob_kind],
        ["weights", turn.weight_versions.length ? weights(turn) : null],
        ["prompt's weights", turn.prompt_version && [turn.prompt_version, turn.kv && ` (keys and values: ${turn.kv})`]],
        ["pieces", turn.pieces.length ? turn.pieces.map(piece) : null],
        ["not continued", turn.again],
        ["experts", turn.experts],
        ["marks", marks(turn).length ? marks(turn).map((mark) => badge(mark, "mark")) : null],
        ["rules", turn.forgiven.length ? turn.forgiven.map((rule) => badge(rule, "rule")) : null],
        ["call", idText(turn.call, "the call's id")],
      ]),
      h("h3", {}, "Replies in the history"),
      ...this.echoes(turn, other),
      h("h3", {}, "Reply as served"),
      ...served(turn.served),
      ...lost(turn.lost),
    ].filter(Boolean);
  }

  /** What changed in the request: a sentence, and the first message that differs unless it is a reply that is compared below. */
  changed({ change, number, echoes }) {
    if (!change?.text || !number) return [];
    const { turns } = this.page.outline;
    const against = turns[change.against];
    const link = against && h("a", { href: `#/session/${encodeURIComponent(this.page.name)}/turn/${encodeURIComponent(against.id)}` }, `turn ${against.number}`);
    const below = echoes.some((echo) => echo.at === change.message);
    return [
      h("p", { class: "why change" }, link ? ["compared with ", link, ": "] : "", visible(change.text)),
      change.parts.length && !below ? h("details", { class: "changed" }, h("summary", {}, `message ${change.message}, whole`), pairs(change.parts, { before: "before", now: "now" })) : null,
    ];
  }

  echoes(turn, other) {
    if (turn.torn) return [note(`The records of its messages are torn: ${turn.torn}`)];
    if (turn.kept === false) return [note("Its messages are not kept.")];
    const changed = turn.echoes.filter((echo) => echo.verdict !== "same");
    const same = turn.echoes.length - changed.length;
    const plain = same ? note(same === 1 ? "One reply in the history came back as it was served." : `${count(same)} replies in the history came back as they were served.`) : null;
    if (!turn.echoes.length) return [note("The new messages of this request contain no reply of the model.")];
    return [...changed.reverse().map((echo) => comparison(echo, other)), plain];
  }
}

/** The policy version that sampled each part of the reply, and who reported it. */
function weights(turn) {
  const spans = turn.weight_versions.map((one) => `${one.version}: tokens ${one.start} to ${one.end}`);
  return [spans.join(", "), turn.version_source && ` (from: ${turn.version_source})`];
}

/** A part of a reply that was continued. */
function piece(one) {
  return h("div", {}, `tokens ${one.start} to ${one.end}, ended: ${one.ended}, ${one.engine} `, idText(one.call, "the call's id"));
}

function facts(rows) {
  return h("dl", { class: "facts-list" }, rows.filter(([, value]) => value !== null && value !== undefined && value !== "").flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
}

/** A reply in the history next to the served one: two columns with the differences marked. */
function comparison(echo, other) {
  const fate = echo.elsewhere ? "sampled in another context" : echo.relied ? "the prompt holds its exact tokens" : echo.verdict === "unknown" ? "" : "not recognized as the model's: the prompt does not hold its exact tokens";
  return h("section", { class: `echo v-${echo.verdict}`, data: { verdict: echo.verdict } },
    h("header", {}, badge(echo.verdict, `v-${echo.verdict}`), echo.rules.map((rule) => badge(rule, "rule")),
      h("span", { class: "muted" }, `message ${echo.at}`, echo.turn ? [", sampled in ", other(echo.turn)] : "")),
    h("p", { class: "muted" }, VERDICTS[echo.verdict], fate ? `; ${fate}` : "", "."),
    pairs(echo.parts, { served: "as served", "came back": "as it came back" }));
}

/** The parts of two messages next to each other, with the differences marked; `sides` has the titles of the two, and their names. */
function pairs(parts, sides) {
  return parts.map(([name, segments]) =>
    segments.every(([kind]) => kind !== "differs")
      ? h("p", { class: "alike" }, h("b", {}, name), " unchanged")
      : h("div", { class: "pair" },
          h("h4", {}, name),
          Object.entries(sides).map(([title, label], n) =>
            h("div", { class: "side", role: "group", "aria-label": `${name} ${label}` }, h("h5", {}, title), h("pre", {}, side(segments, n + 1))))));
}

function side(segments, which) {
  const texts = segments.map((segment) => {
    if (segment[0] === "left-out") return h("span", { class: "left-out" }, `\n… ${count(Number(segment[1]))} equal characters …\n`);
    if (segment[0] === "same") return visible(segment[which]);
    return segment[which] ? h(which === 1 ? "del" : "ins", {}, visible(segment[which])) : h("span", { class: "gap", title: "nothing here" });
  });
  return segments.every((segment) => !segment[which]) ? h("span", { class: "muted" }, "nothing") : texts;
}

/** How the harness names the agent that made the call: what it says, which proves nothing. */
function agentText({ id, parent, kind }) {
  const parts = [id && readable(id), kind && `kind ${readable(kind)}`, parent && `started by ${readable(parent)}`];
  return [parts.filter(Boolean).join(", "), h("span", { class: "muted" }, " (as the harness says)")];
}

/** Its marks, and one for text that a parser of the engine dropped. */
const marks = (turn) => [...turn.marks, ...(turn.lost.texts.length ? ["lost-text"] : [])];

/** What the model sampled and the harness never received. */
function lost({ texts, unknown }) {
  if (unknown && unknown !== "broken-off") return [note(`Whether a parser dropped text of it is not known (${unknown}).`)];
  return texts.length ? [h("h3", {}, "Lost to the parser"), ...texts.map((text) => h("div", { class: "said lost" }, h("pre", {}, visible(text))))] : [];
}

function served(message) {
  const parts = [["reasoning", message.reasoning], ["content", message.content]];
  for (const call of message.tool_calls) parts.push([`call ${call.name}`, call.arguments, call.id]);
  const there = parts.filter(([, text]) => text);
  if (!there.length) return [note("Nothing.")];
  return there.map(([name, text, id]) => h("div", { class: "said" }, h("h4", {}, name, id ? copier(id, "the call's id") : null), h("pre", {}, visible(text))));
}
