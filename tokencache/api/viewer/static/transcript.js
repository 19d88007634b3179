// Shows the conversation of a sequence, message by message: what the system prompt, the user and the tools say, and each reply with its
// reasoning and calls. Only messages near the visible part are on the page.

import { at, get } from "./api.js";
import { Blocks } from "./blocks.js";
import { badge, copier, h, note } from "./dom.js";
import { count, readable } from "./format.js";
import { Media } from "./media.js";
import { runAt } from "./tokens.js";
import { KINDS } from "./words.js";

const SIZE = 25; // messages in a block
const HEIGHT = { lines: 34, short: 132, whole: 210 }; // expected height of a message, in pixels
const PREVIEW = 160;
const LINES = 8; // of a text in a short message (also in tokens.css)
const LONG = 500; // characters that may need more lines
const PREVIEWS = { call: (part) => `${part.name}(${part.text})`, media: (part) => `[${part.name || "unknown"}]` };
export const FOLDS = { lines: "one line each", short: "short", whole: "whole" };

export class Transcript {
  current = -1;
  held = false; // whether the current message stays in view, until the user scrolls
  open = new Set(); // messages that the user unfolded

  /** `page` is the page of the sequence; `jump(token)` shows a token. */
  constructor(page, jump) {
    Object.assign(this, { page, jump, media: new Media(page.session, page.signal) });
    this.path = at(page.session, "sequences", page.target.id, "messages");
    this.body = h("div", { class: "messages" });
    this.folds = h("div", { class: "choices", role: "group", "aria-label": "How much of each message is shown" });
    this.element = h("section", { class: "transcript", "aria-label": "Transcript" }, h("div", { class: "fold-bar" }, this.folds), this.body);
    for (const kind of ["wheel", "touchmove", "pointerdown"]) this.body.addEventListener(kind, () => (this.held = false), { passive: true });
  }

  async start() {
    const found = await get(this.path, { end: SIZE }, this.page.signal);
    this.starts = found.starts;
    this.blocks = new Blocks(found.messages, {
      size: SIZE,
      fetch: async (start, end) => (start ? get(this.path, { start, end }, this.page.signal) : found),
      draw: ({ window }) => window.map((place) => this.message(place)),
      drawn: () => this.mark(),
      height: () => SIZE * HEIGHT[this.fold],
      scroll: (node, block) => this.scroll(node, block),
    });
    this.setFold(found.messages > 60 ? "lines" : "short");
    this.body.replaceChildren(
      found.kept ? "" : note("The requests of this session are not kept: only the replies are shown."),
      this.blocks.element,
    );
    this.blocks.start();
    this.page.signal.addEventListener("abort", () => this.blocks.stop());
  }

  setFold(fold) {
    this.fold = fold;
    this.open.clear();
    this.body.className = `messages fold-${fold}`;
    for (const node of this.body.querySelectorAll(".message.open")) node.classList.remove("open");
    for (const node of this.body.querySelectorAll(".reasoning")) node.open = fold === "whole";
    this.folds.replaceChildren(...Object.entries(FOLDS).map(([name, text]) =>
      h("button", { type: "button", "aria-pressed": String(name === fold), onclick: () => this.setFold(name) }, text)));
    for (const block of this.blocks.blocks) if (block.classList.contains("away")) block.style.height = `${HEIGHT[fold] * SIZE}px`;
  }

  /** Show which message holds a token. */
  async show(token) {
    if (!this.blocks?.total || !this.element.offsetParent) return;
    let found = this.starts.findLastIndex((start) => start <= token);
    while (found > 0 && this.starts[found - 1] === this.starts[found]) found -= 1; // the first of those that share a range
    this.current = found;
    this.held = true;
    await this.blocks.reveal(found).catch(() => null);
    this.mark();
  }

  mark() {
    for (const node of this.body.querySelectorAll(".message")) {
      const current = Number(node.dataset.i) === this.current;
      node.classList.toggle("current", current);
      if (current && this.held) this.scroll(node, "nearest");
    }
  }

  /** Scroll only the transcript if it has a scroll bar of its own, because the tokens next to it must stay where they are. */
  scroll(node, block) {
    if (getComputedStyle(this.body).overflowY !== "auto") return node.scrollIntoView({ block });
    const [box, own] = [node.getBoundingClientRect(), this.body.getBoundingClientRect()];
    if (block === "start" || box.top < own.top) this.body.scrollTop += box.top - own.top - 4;
    else if (box.bottom > own.bottom) this.body.scrollTop += Math.min(box.bottom - own.bottom + 4, box.top - own.top - 4);
  }

  /** Draw one message: {at, turn, asked, tokens, message: {role, name, media, parts} or null}. */
  message(place) {
    const { page } = this;
    const [start, end] = place.tokens;
    const { role = "unreadable", name = null, parts = [] } = place.message ?? {};
    const run = page.found.runs[runAt(page.found.runs, start)];
    const kind = place.turn ? run?.kind ?? "prompt" : "prompt";
    const preview = parts.map((part) => PREVIEWS[part.kind]?.(part) ?? part.text).at(-1) ?? "";
    const node = h("article", { class: `message k-${kind}${role === "tool" ? " result" : ""}${this.open.has(place.at) ? " open" : ""}`, data: { i: place.at } },
      h("header", {},
        h("button", { type: "button", class: "role", title: "show or fold", onclick: () => this.toggle(place, node) }, readable(role)),
        name ? h("b", {}, readable(name)) : null,
        place.turn ? page.turnLink(place.turn) : null,
        place.turn && kind !== "sampled" ? badge(KINDS[kind][0], `k-${kind}`, KINDS[kind][1]) : null,
        role === "assistant" && !place.turn ? badge("not recognized", "plain", "the harness sent it as a reply, but it is not recognized as one of the model's") : null,
        h("span", { class: "preview" }, readable(preview.slice(0, PREVIEW))),
        end > start ? h("a", { class: "place", href: `${page.base}/sequence/${encodeURIComponent(page.target.id)}?token=${start}`, title: "show its tokens",
          onclick: (event) => (event.preventDefault(), this.jump(start)) }, `${count(start)}–${count(end - 1)}`) : null),
      h("div", { class: "words" },
        place.message === null ? note("This message cannot be read.") : parts.length ? parts.map((part) => this.part(place, part)) : note("Nothing.")),
      parts.some(({ text }) => text.length > LONG || text.split("\n").length > LINES)
        ? h("button", { type: "button", class: "unfold", onclick: () => this.toggle(place, node) }, "show all") : null);
    return node;
  }

  part(place, part) {
    if (part.kind === "media") return this.media.part(part);
    const rest = part.cut ? this.more(place, part) : null;
    if (part.kind === "reasoning")
      return h("details", { class: "reasoning", open: this.fold === "whole" || place.message.parts.length === 1 },
        h("summary", {}, `reasoning · ${count(part.length)} characters`), h("div", { class: "said-text" }, readable(part.text)), rest);
    if (part.kind === "call")
      return h("div", { class: "call" }, h("b", {}, readable(part.name)), part.id ? copier(part.id, "the call's id") : null, this.given(part), rest);
    return h("div", { class: "said-text" }, readable(part.text), rest);
  }

  /** The arguments of a call: one row for each, so that a command of many lines is readable. Others are shown as they were written. */
  given({ text, cut }) {
    let value = null;
    try {
      value = !cut && !/\d{16}/.test(text) ? JSON.parse(text) : null; // JavaScript rounds longer numbers
    } catch {
      // invalid JSON is shown as it was written
    }
    if (value === null || typeof value !== "object" || Array.isArray(value)) return h("pre", {}, readable(text));
    const rows = Object.entries(value).flatMap(([name, one]) => [
      h("dt", {}, readable(name)),
      h("dd", {}, h("pre", { class: typeof one === "string" ? null : "value" }, readable(typeof one === "string" ? one : JSON.stringify(one, null, 1)))),
    ]);
    return rows.length ? h("dl", { class: "given" }, rows) : h("pre", {}, "{}");
  }

  more(place, part) {
    const button = h("button", { type: "button", class: "more", onclick: () => this.fetchWhole(place, button) }, `show all ${count(part.length)} characters`);
    return button;
  }

  /** Replace a cut message by the whole one. */
  async fetchWhole(place, button) {
    button.disabled = true;
    try {
      const { window: [whole] } = await get(this.path, { start: place.at, end: place.at + 1 }, this.page.signal);
      this.open.add(place.at);
      button.closest(".message")?.replaceWith(this.message(whole));
    } catch (why) {
      if (why.name !== "AbortError") button.replaceChildren(`${why.message}: try again`);
      button.disabled = false;
    }
  }

  toggle(place, node) {
    const open = node.classList.toggle("open");
    if (open) this.open.add(place.at);
    else this.open.delete(place.at);
  }
}
