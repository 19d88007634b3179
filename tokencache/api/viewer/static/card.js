// Shows the card next to a token: its id, text, log probability, kind and turn.

import { at, get } from "./api.js";
import { copier, h } from "./dom.js";
import { chance, count, quoted } from "./format.js";
import { KINDS } from "./words.js";

const SHOWN = 64; // ids of a plain rendering that are decoded for the card

export class Card {
  constructor(session, signal) {
    Object.assign(this, { session, signal, read: new Map() });
    this.element = h("div", { class: "card", role: "tooltip", id: "card", hidden: true });
    this.pinned = false;
  }

  hide() {
    this.element.hidden = true;
    this.pinned = false;
  }

  /** Show the card of a token next to its node: {i, id, text, logprob, run, group, site, siteTurn, turn}. */
  show(node, token, pinned) {
    this.pinned = pinned;
    const [kind, meaning] = KINDS[token.run.kind];
    const rows = [
      ["token", h("b", {}, count(token.i))],
      ["id", [h("code", {}, String(token.id)), pinned ? copier(String(token.id), "the token's id") : null]],
      ["text", token.text === null ? "not available: the engine cannot decode it" : h("code", { class: "quoted" }, quoted(token.text))],
      token.group > 1 ? ["", `one character in ${token.group} tokens`] : null,
      ["log prob", token.logprob === null ? "none: mask 0" : h("code", {}, chance(token.logprob))],
      ["mask", token.run.kind === "sampled" ? "1: trained here" : "0"],
      ["kind", [h("i", { class: `dot k-${token.run.kind}` }), h("span", { title: meaning }, kind)]],
      ["turn", token.turn],
    ].filter(Boolean);
    this.element.replaceChildren(
      h("dl", {}, rows.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])),
      token.site ? this.site(token.site, token.siteTurn) : "",
    );
    this.element.classList.toggle("pinned", pinned);
    this.element.hidden = false;
    this.place(node);
  }

  place(node) {
    const box = node.getClientRects()[0] ?? node.getBoundingClientRect();
    const own = this.element.getBoundingClientRect();
    const left = Math.min(Math.max(8, box.left), window.innerWidth - own.width - 8);
    const below = box.bottom + 6 + own.height < window.innerHeight;
    this.element.style.left = `${left}px`;
    this.element.style.top = `${below ? box.bottom + 6 : Math.max(8, box.top - own.height - 6)}px`;
  }

  site(site, turn) {
    const there = h("code", { class: "quoted" }, site.rendered.length ? "…" : "nothing");
    if (site.rendered.length) this.texts(site, turn).then((text) => (there.textContent = text));
    const what = site.start === site.end ? "before this token" : `in place of ${site.end - site.start === 1 ? "this token" : `${count(site.end - site.start)} tokens`}`;
    return h("div", { class: "site" },
      h("p", {}, h("b", {}, "A plain rendering differs"), ` (${site.cause})`),
      h("p", {}, `${what} it has `, there, site.rendered.length ? ` (${count(site.rendered.length)} ${site.rendered.length === 1 ? "token" : "tokens"})` : ""));
  }

  /** The text that a plain rendering has at a site, or its ids if they cannot be decoded. */
  async texts(site, turn) {
    const ids = site.rendered.slice(0, SHOWN).join(",");
    const more = site.rendered.length > SHOWN ? "…" : "";
    if (!this.read.has(ids)) {
      const asked = get(at(this.session, "texts"), { turn, ids }, this.signal).catch(() => ({ texts: null }));
      this.read.set(ids, asked);
    }
    const { texts } = await this.read.get(ids);
    return texts ? quoted(texts.map((text) => text ?? "").join("")) + more : ids.replaceAll(",", " ") + more;
  }
}
