// The page of one sequence: its conversation as a transcript, next to its tokens, colored by kind.

import { at, get } from "./api.js";
import { Blocks } from "./blocks.js";
import { Card } from "./card.js";
import { crumbs } from "./crumbs.js";
import { badge, copier, h, note } from "./dom.js";
import { driftOf } from "./drift.js";
import { count, many, share } from "./format.js";
import { Minimap } from "./minimap.js";
import { walkRows } from "./poll.js";
import { drawTokens, mediumAt, runAt } from "./tokens.js";
import { Transcript } from "./transcript.js";
import { KINDS, reasonText, STARTS } from "./words.js";

const TOP = 150; // height of the bar above, in pixels
const BLOCK = 512; // tokens in a block
const VIEWS = { transcript: "transcript", both: "both", tokens: "tokens" };
const WIDE = window.matchMedia("(min-width: 1000px)"); // below this width, one view is shown at a time

/** The expected height of a block of tokens, in pixels. */
const blockHeight = (width) => Math.ceil((BLOCK * 5.2) / Math.max((width - 150) / 7.3, 20)) * 21;

export class SequencePage {
  current = -1;
  held = null; // position in the view at which the current token stays until the user scrolls
  sites = [];

  constructor(root, target, signal) {
    Object.assign(this, { root, target, signal, session: target.session });
    this.base = `#/session/${encodeURIComponent(target.session)}`;
    this.up = `${this.base}?tab=sequences`;
    root.classList.add("sequence");
  }

  stays(target) {
    return target.session === this.session && target.id === this.target.id && this.blocks !== undefined;
  }

  go(target) {
    this.target = target;
    const token = Number.parseInt(target.query.get("token") ?? "", 10);
    if (token !== this.current) this.jump(token);
  }

  async start() {
    const asked = [get(at(this.session, "sequences", this.target.id), {}, this.signal), get(at(this.session, "outline"), {}, this.signal)];
    const [found, outline] = await Promise.all(asked);
    this.found = found;
    this.turns = new Map(outline.turns.map((turn) => [turn.id, turn]));
    this.own = new Set(found.turns);
    this.one = outline.sequences.find((sequence) => sequence.id === found.id);
    this.card = new Card(this.session, this.signal);
    this.blocks = new Blocks(found.tokens, {
      size: BLOCK, fetch: (start, end) => this.fetch(start, end), draw: (tokens) => this.draw(tokens), drawn: () => this.drawn(), height: blockHeight,
    });
    this.transcript = new Transcript(this, (token) => this.jumpToTokens(token));
    this.map = new Minimap(found.tokens, found.runs, (token) => this.jump(token, false, "start"));
    crumbs(["sessions", "#/"], [this.session, this.base], [`sequence ${this.one.number}`, ""]);
    this.build();
    this.setView(WIDE.matches ? "both" : this.target.query.has("token") ? "tokens" : "transcript");
    this.blocks.start();
    this.transcript.start().then(() => this.transcript.show(this.current)).catch((why) => this.transcript.body.replaceChildren(note(why.message)));
    window.addEventListener("scroll", () => this.looked(), { signal: this.signal, passive: true });
    window.addEventListener("resize", () => this.looked(), { signal: this.signal });
    for (const kind of ["wheel", "touchmove", "pointerdown", "keydown"])
      window.addEventListener(kind, () => (this.held = null), { signal: this.signal, passive: true, capture: true });
    this.signal.addEventListener("abort", () => this.blocks.stop());
    this.go(this.target);
    this.looked();
    await this.measure();
  }

  build() {
    const { found, one } = this;
    const sums = new Map();
    for (const run of found.runs) sums.set(run.kind, (sums.get(run.kind) ?? 0) + run.end - run.start);
    const legend = Object.keys(KINDS).filter((kind) => sums.has(kind)).map((kind) =>
      h("li", { title: KINDS[kind][1] }, h("i", { class: `dot k-${kind}` }), KINDS[kind][0], h("span", { class: "n" }, count(sums.get(kind)))));
    const scale = ["> .9", "> .7", "> .5", "> .3", "> .1", "> .03", "> .01", "less"];
    this.scale = h("ul", { class: "scale", "aria-label": "Probability", hidden: true }, scale.map((text, n) => h("li", { class: `p${n}` }, text)));
    this.heatButton = h("button", { type: "button", "aria-pressed": "false", title: "color sampled tokens by their probability (h)", onclick: () => this.heat() }, "heat");
    this.goTo = h("input", { id: "goto", inputmode: "numeric", placeholder: "token", "aria-label": "Go to token", size: 9, spellcheck: "false", onchange: () => this.goToInput() });
    this.views = h("div", { class: "choices", role: "group", "aria-label": "View" });
    this.driftNote = h("span", { class: "muted" }, "measuring drift…");
    this.unread = h("p", { class: "note", hidden: true });
    const stage = h("div", { class: "stage", tabindex: 0, role: "group", "aria-label": "Tokens", "aria-describedby": "card" }, this.blocks.element);
    stage.addEventListener("pointerover", (event) => this.over(event));
    stage.addEventListener("pointerleave", () => this.card.pinned || this.card.hide());
    stage.addEventListener("click", (event) => this.over(event, true));
    this.stage = stage;
    const bar = h("div", { class: "sticky" },
      h("div", { class: "tools" },
        this.views,
        h("ul", { class: "legend" }, legend),
        h("span", { class: "grow" }),
        this.driftNote,
        h("span", { class: "group" },
          h("button", { type: "button", title: "previous turn ([)", "aria-label": "previous turn", onclick: () => this.step(-1) }, "‹"),
          h("span", { class: "muted" }, "turn"),
          h("button", { type: "button", title: "next turn (])", "aria-label": "next turn", onclick: () => this.step(1) }, "›")),
        this.scale, this.heatButton, this.goTo),
      this.map.element);
    const sized = new ResizeObserver(() => this.root.style.setProperty("--bar", `${bar.offsetHeight}px`)); // the transcript begins below it
    sized.observe(bar);
    this.signal.addEventListener("abort", () => sized.disconnect());
    this.root.replaceChildren(
      h("div", { class: "bar" },
        h("h1", {}, `Sequence ${one.number}`), copier(found.id, "the sequence's id"),
        badge(one.start, one.start, STARTS[one.start]),
        one.reason ? h("span", { class: "reason", title: reasonText(one.reason) }, `${one.reason}: ${reasonText(one.reason)}`) : null,
        h("span", { class: "facts" },
          h("span", {}, many(found.tokens, "token")),
          h("span", {}, `${count(one.trainable_tokens)} trainable, ${share(one.trainable_tokens, found.tokens)}`),
          h("span", {}, many(one.turns, "turn")),
          one.parent === null ? null : h("span", {}, "from ", h("a", { href: `${this.base}/turn/${encodeURIComponent(one.from_turn)}` }, `turn ${this.turns.get(one.from_turn).number}`), ` of sequence ${one.parent}`))),
      bar,
      this.unread,
      h("div", { class: "pair-of-views" }, this.transcript.element, stage),
      this.card.element);
    if (!found.tokens) stage.replaceChildren(note("No tokens."));
  }

  /** Show the transcript, the tokens or both. A narrow window has no room for both. */
  setView(view) {
    this.view = view;
    this.root.dataset.view = view;
    this.views.replaceChildren(...Object.entries(VIEWS).map(([name, text]) =>
      h("button", { type: "button", class: `v-${name}`, "aria-pressed": String(name === view), onclick: () => this.setView(name) }, text)));
    this.looked();
  }

  /** Show a token from the transcript: in a narrow window the tokens replace it. */
  jumpToTokens(token) {
    if (this.view === "transcript") this.setView(WIDE.matches ? "both" : "tokens");
    this.jump(token, false, "start");
  }

  async fetch(start, end) {
    const tokens = await get(at(this.session, "sequences", this.target.id, "tokens"), { start, end }, this.signal);
    this.unread.hidden = tokens.texts !== null;
    this.unread.textContent = tokens.texts === null ? `Token ids only: ${tokens.unread}` : "";
    return tokens;
  }

  draw(tokens) {
    return drawTokens(tokens, this.found.runs, this.sites, this.found.media, (id) => this.turnLink(id));
  }

  turnLink(id) {
    const turn = this.turns.get(id);
    return h("a", { class: "turn", href: `${this.base}/turn/${encodeURIComponent(id)}`, title: turn ? `${turn.match}${turn.reason ? `: ${turn.reason}` : ""}` : id }, turn ? `turn ${turn.number}` : id.slice(0, 8));
  }

  /** Called after nodes were replaced: marks the current token again, and keeps it in place unless the user has scrolled since. */
  drawn() {
    const node = document.getElementById(`t${this.current}`);
    node?.classList.add("current");
    if (node && this.held) node.scrollIntoView({ block: this.held });
    this.looked();
  }

  // --- the visible part

  looked() {
    if (this.looking) return;
    this.looking = requestAnimationFrame(() => {
      this.looking = null;
      this.map.look(...this.blocks.view(TOP, window.innerHeight));
      const node = document.getElementById(`t${this.current}`);
      if (!node) this.card.hide();
      else if (this.card.pinned) this.card.place(node);
    });
  }

  over(event, pin = false) {
    const node = event.target.closest?.(".t");
    if (node && (pin || !this.card.pinned)) this.tell(node, pin);
    else if (pin) this.card.hide();
  }

  tell(node, pin) {
    const i = Number(node.dataset.i);
    const start = Number(node.closest(".block").dataset.start);
    const tokens = this.blocks.known.get(start);
    if (!tokens) return;
    const text = (n) => tokens.texts?.[n - start];
    let first = i;
    while (first > start && text(first) === null) first -= 1;
    let last = first + 1;
    while (last < tokens.end && text(last) === null) last += 1;
    const run = this.found.runs[runAt(this.found.runs, i)];
    const site = this.sites.find((one) => one.start <= i && i < Math.max(one.end, one.start + 1));
    this.card.show(node, {
      i, id: tokens.ids[i - start], text: tokens.texts ? text(first) ?? "" : null, logprob: tokens.logprobs[i - start],
      run, group: tokens.texts ? last - first : 1, site, siteTurn: this.found.turns.at(-1), turn: this.turnLink(run.turn),
    }, pin);
    if (pin) this.select(i);
  }

  /** Make a token the current one: mark it and put it into the address. */
  select(i) {
    document.getElementById(`t${this.current}`)?.classList.remove("current");
    this.current = i;
    document.getElementById(`t${i}`)?.classList.add("current");
    history.replaceState(null, "", `${this.base}/sequence/${encodeURIComponent(this.target.id)}?token=${i}`);
    this.transcript.show(i);
  }

  async jump(token, pin = true, block = "center") {
    token = mediumAt(this.found.media, token)?.start ?? token; // an image is one box
    if (!(token >= 0 && token < this.found.tokens)) return;
    const node = await this.blocks.reveal(token).catch(() => null);
    if (!node) return;
    this.held = block;
    node.scrollIntoView({ block });
    this.select(token);
    if (pin) this.tell(node, true);
    this.looked();
  }

  goToInput() {
    const token = Number.parseInt(this.goTo.value.replaceAll(/[\s,.]/g, ""), 10);
    this.goTo.value = "";
    this.goTo.blur();
    this.jump(Math.min(token, this.found.tokens - 1));
  }

  /** Jump to the first sampled token of the next or previous turn. */
  step(way) {
    const starts = this.found.runs.filter((run) => run.kind === "sampled" || run.kind === "unscored").map((run) => run.start);
    this.jump(way > 0 ? starts.find((start) => start > this.current) : starts.findLast((start) => start < this.current));
  }

  stepSite(way) {
    const starts = this.sites.map((site) => site.start);
    this.jump(way > 0 ? starts.find((start) => start > this.current) : starts.findLast((start) => start < this.current));
  }

  heat() {
    const on = this.stage.classList.toggle("heat");
    this.heatButton.setAttribute("aria-pressed", String(on));
    this.scale.hidden = !on;
  }

  key(event) {
    const medium = mediumAt(this.found.media, this.current);
    const jumps = { ArrowLeft: this.current - 1, ArrowRight: medium ? medium.start + medium.length : this.current + 1 };
    if (event.key in jumps) this.jump(jumps[event.key], true, "nearest");
    else if (event.key === "Home") this.jump(0, false);
    else if (event.key === "End") this.jump(this.found.tokens - 1, false);
    else if (event.key === "[") this.step(-1);
    else if (event.key === "]") this.step(1);
    else if (event.key === "n") this.stepSite(1);
    else if (event.key === "p") this.stepSite(-1);
    else if (event.key === "h") this.heat();
    else if (event.key === "/") this.goTo.focus();
    else if (event.key === "Escape") this.card.hide();
    else if (event.key === "j" || event.key === "k") return walkRows(event, [...this.transcript.body.querySelectorAll(".role")]);
    else return false;
    return true;
  }

  // --- drift

  async measure() {
    const last = this.found.turns.at(-1);
    const { turns, unmeasured, why } = await driftOf(this.session, this.signal);
    const one = turns.get(last);
    if (!one) {
      this.driftNote.textContent = `drift: ${unmeasured.get(last) ?? (why || "not measured")}`;
      return;
    }
    this.sites = [...one.sites].sort((a, b) => a.start - b.start);
    this.driftNote.textContent = this.sites.length ? `a plain rendering differs in ${many(this.sites.length, "place")}` : "a plain rendering is identical";
    this.driftNote.classList.toggle("drifts", this.sites.length > 0);
    this.map.mark(this.sites.map((site) => site.start));
    this.blocks.redraw();
    const node = document.getElementById(`t${this.current}`);
    if (node && this.card.pinned) this.tell(node, true); // its card may have more to show now
  }
}
