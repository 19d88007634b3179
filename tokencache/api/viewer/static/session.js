// The page of one session: its figures, and tabs with its turns, sequences, incidents and applied rules.

import { Actions } from "./actions.js";
import { at, get } from "./api.js";
import { crumbs } from "./crumbs.js";
import { badge, copier, h, note } from "./dom.js";
import { driftOf, driftSums } from "./drift.js";
import { count, many, moment, readable, reward, share, span } from "./format.js";
import { poll, walkRows } from "./poll.js";
import { failure, term } from "./sessions.js";
import { incidentTable, ruleTable, sequenceTable } from "./tables.js";
import { tree } from "./tree.js";
import { TurnPanel } from "./turn.js";
import { STARTS } from "./words.js";

const TABS = { turns: "turns", sequences: "sequences", incidents: "incidents", forgiven: "applied rules" }; // id in the address: label

export class SessionPage {
  constructor(root, target, signal) {
    Object.assign(this, { root, target, signal, name: target.session, shown: "", drift: null, links: [], changes: [], linked: -1, unfolded: new Set() });
    crumbs(["sessions", "#/"], [target.session, ""]);
    this.up = "#/";
    this.head = h("div", { class: "head" });
    this.figures = h("div");
    this.tabs = h("nav", { class: "tabs", "aria-label": "Parts of the session" });
    this.list = h("div", { class: "list-side" });
    this.panel = new TurnPanel(this, signal);
    this.actions = new Actions(this.name, { signal, changed: () => this.refresh().catch(() => {}), gone: () => (location.hash = "#/") });
    root.append(this.head, this.actions.element, this.figures, this.tabs, h("div", { class: "split" }, this.list, this.panel.element));
    root.classList.add("session");
  }

  stays(target) {
    return target.session === this.name && target.what !== "sequence";
  }

  go(target) {
    this.target = target;
    this.showPart();
  }

  async start() {
    await this.refresh(); // an unknown session is reported on the page itself
    this.measure().catch(() => {}); // the page was left
    await poll(() => this.refresh(), 3, this.signal);
  }

  async measure() {
    this.drift = await driftOf(this.name, this.signal);
    this.showHead();
  }

  async refresh() {
    const found = await get(at(this.name, "outline"), {}, this.signal);
    const now = JSON.stringify(found);
    if (now === this.shown) return;
    this.shown = now;
    this.outline = found;
    this.turns = new Map(found.turns.map((turn) => [turn.id, turn]));
    this.showHead();
    this.showPart();
    this.readLinks().catch(() => {}); // the page was left, or the records are torn: the turns are shown without links
  }

  /** Read the links of the session again after a turn was added. */
  async readLinks() {
    const turns = this.outline.turns.length;
    if (turns === this.linked) return;
    this.linked = turns;
    const { links, changes } = await get(at(this.name, "changes"), {}, this.signal);
    this.changes = changes;
    this.showHead();
    if (JSON.stringify(links) === JSON.stringify(this.links)) return;
    this.links = links;
    this.showPart();
  }

  href(tab) {
    return `#/session/${encodeURIComponent(this.name)}${tab === "turns" ? "" : `?tab=${tab}`}`;
  }

  get tab() {
    const asked = this.target.query.get("tab");
    return Object.hasOwn(TABS, asked) ? asked : "turns";
  }

  showHead() {
    const { outline } = this;
    const kinds = [...new Set(outline.turns.map((turn) => turn.model))].filter(Boolean).map(readable);
    const harnesses = [...new Set(outline.turns.map((turn) => turn.harness))].filter(Boolean);
    const dialects = [...new Set(outline.turns.map((turn) => turn.dialect))].filter(Boolean);
    const facts = [kinds.join(", "), harnesses.join(", "), dialects.join(", "), `began ${moment(outline.created)}`, `used for ${span(outline.used - outline.created)}`];
    this.actions.update(outline);
    this.head.replaceChildren(
      h("div", { class: "bar" },
        h("h1", {}, outline.session), copier(outline.session, "the session's name"),
        outline.open_calls.length ? badge(`live · ${outline.open_calls.length} open`, "live") : null,
        outline.state === "open" ? null : badge(outline.state),
        outline.complete ? badge("complete") : badge("incomplete", "incomplete", "a reply of the model is missing or still to come: see the incidents"),
        failure(outline),
        this.transcriptLink(),
        h("span", { class: "facts" }, facts.filter(Boolean).map((fact) => h("span", {}, fact)))),
      this.labels() ?? "");
    this.figures.replaceChildren(
      h("dl", { class: "tiles" }, ...this.tiles().map(([name, value, more, level]) =>
        h("div", { class: level ? `tile-${level}` : null, data: { tile: name } }, h("dt", {}, name), h("dd", {}, value, more ? h("small", {}, more) : null)))),
      mix(outline.figures.matches) ?? "",
    );
  }

  /** Group, tags and metadata. */
  labels() {
    const { group, tags, metadata } = this.outline;
    const known = Object.entries(metadata);
    if (!group && !tags.length && !known.length) return null;
    const open = this.head.querySelector(".metadata")?.open; // as it was before a refresh
    return h("div", { class: "bar labels" },
      group ? h("span", {}, "group ", h("a", { href: `#/group/${encodeURIComponent(group)}` }, readable(group))) : null,
      tags.map((tag) => h("a", { class: "badge", href: `#/?${new URLSearchParams({ filter: term("tag", tag) })}`, title: "sessions with this tag" }, readable(tag))),
      known.length ? h("details", { class: "metadata", open }, h("summary", {}, "metadata"), h("pre", {}, readable(JSON.stringify(metadata, null, 1)))) : null);
  }

  /** A link to the transcript of the longest sequence. */
  transcriptLink() {
    const longest = this.outline.sequences.reduce((best, one) => (best && best.tokens >= one.tokens ? best : one), null);
    return longest && h("a", { class: "button", href: `#/session/${encodeURIComponent(this.name)}/sequence/${encodeURIComponent(longest.id)}` }, "transcript");
  }

  tiles() {
    const { figures, incidents } = this.outline;
    const sum = (counts) => Object.values(counts).reduce((a, b) => a + b, 0);
    const all = figures.trainable_tokens + figures.masked_tokens;
    const { reward: given, reward_components: components } = this.outline;
    return [
      given === null && !Object.keys(components).length ? null : ["reward", reward(given), Object.entries(components).map(([name, value]) => `${readable(name)} ${reward(value)}`).join(", ")],
      ["calls", count(figures.calls), figures.turns === figures.calls ? "" : many(figures.turns, "turn")],
      ["sequences", count(figures.sequences), ""],
      ["trainable tokens", count(figures.trainable_tokens), `${share(figures.trainable_tokens, all)} of ${count(all)}`],
      ["masked tokens", count(figures.masked_tokens), figures.untrainable_tokens ? `${count(figures.untrainable_tokens)} sampled, unscored` : ""],
      this.versionTile(sum),
      ["applied rules", count(sum(figures.forgiven)), many(Object.keys(figures.forgiven).length, "rule")],
      incidentTile(incidents, this.outline.failed_calls),
      this.driftTile(),
      this.lostTile(),
    ].filter(Boolean);
  }

  /** The policy versions that sampled the trainable tokens. */
  versionTile(sum) {
    const { versions, mixed_tokens: mixed, oldest_version: oldest, newest_version: newest, trainable_tokens: all } = this.outline.figures;
    const names = Object.keys(versions);
    if (!names.length && !mixed) return null;
    const unknown = all - sum(versions) - mixed;
    const notes = [mixed ? `${many(mixed, "token")} mixed` : "", unknown ? `${many(unknown, "token")} not known` : ""];
    return ["policy version", oldest === "" ? many(names.length, "version") : oldest === newest ? oldest : `${oldest} to ${newest}`, notes.filter(Boolean).join(", ")];
  }

  driftTile() {
    const name = "drift avoided";
    if (this.drift === null) return [name, "…", "measuring"];
    const { prompts, drifted, tokens } = driftSums(this.drift, (id) => this.turns.get(id)?.match);
    if (!prompts) return [name, "–", this.drift.why || "no prompt was spliced"];
    const missing = this.drift.unmeasured.size;
    return [name, many(tokens, "token"), `in ${drifted} of ${many(prompts, "last prompt")}${missing ? `; ${missing} not measured` : ""}`];
  }

  /** What the model sampled and a parser of the engine dropped; no tile if nothing is known to be lost. */
  lostTile() {
    const lost = this.changes.filter((change) => change.lost.length);
    const unknown = this.changes.filter((change) => change.not_compared).length;
    const characters = lost.flatMap((change) => change.lost).reduce((sum, text) => sum + [...text].length, 0);
    return lost.length ? ["lost to the parser", many(characters, "character"), `in ${many(lost.length, "turn")}${unknown ? `; ${unknown} not compared` : ""}`, "missing"] : null;
  }

  showPart() {
    const { outline } = this;
    const numbers = { turns: outline.turns.length, sequences: outline.sequences.length, incidents: outline.incidents.length, forgiven: outline.turns.filter((turn) => turn.forgiven.length).length };
    this.tabs.replaceChildren(...Object.entries(TABS).map(([tab, label]) =>
      h("a", { href: this.href(tab), "aria-current": tab === this.tab ? "page" : null }, label, h("span", { class: "n" }, count(numbers[tab])))));
    const chosen = this.target.what === "turn" ? this.target.id : null;
    const focused = document.activeElement?.closest?.(".list-side a")?.getAttribute("href");
    const build = { turns: tree, sequences: sequenceTable, incidents: incidentTable, forgiven: ruleTable }[this.tab];
    this.list.replaceChildren(build(outline, chosen, this.unfolded, this.links) ?? note("None."));
    if (focused) [...this.list.querySelectorAll("a")].find((link) => link.getAttribute("href") === focused)?.focus({ preventScroll: true });
    this.panel.show(chosen, this.turns.get(chosen));
    this.root.classList.toggle("open", chosen !== null);
    if (chosen !== this.revealed) this.list.querySelector(".chosen")?.scrollIntoView({ block: "nearest" });
    this.revealed = chosen;
  }

  key(event) {
    if (event.key === "Escape" && this.target.what === "turn") return (location.hash = this.href("turns")), true;
    return walkRows(event, [...this.list.querySelectorAll("a.row, tbody a.first")]);
  }
}

function incidentTile(incidents, failed) {
  const missing = incidents.some((one) => one.hole);
  const notes = [missing ? "data is missing" : "", failed.length ? `${many(failed.length, "call")} failed` : ""].filter(Boolean);
  return ["incidents", count(incidents.length), notes.join(", "), missing ? "missing" : incidents.length ? "notice" : ""];
}

function mix(matches) {
  const total = Object.values(matches).reduce((a, b) => a + b, 0);
  const there = Object.keys(STARTS).filter((kind) => matches[kind]);
  if (!total) return null;
  const bar = h("div", { class: "mix-bar", "aria-hidden": "true" }, there.map((kind) => {
    const part = h("i", { class: `f-${kind}` });
    part.style.flexGrow = matches[kind];
    return part;
  }));
  const words = there.map((kind) => h("li", { title: STARTS[kind] }, h("i", { class: `f-${kind}` }), `${count(matches[kind])} ${kind}`));
  return h("div", { class: "mix" }, bar, h("ul", {}, words));
}
