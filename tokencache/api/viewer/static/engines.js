// The engines: what they serve, how many tokens their KV caches hold, and how many sessions fit.

import { get } from "./api.js";
import { lists } from "./crumbs.js";
import { h, note } from "./dom.js";
import { count, share } from "./format.js";
import { poll } from "./poll.js";
import { tableHead } from "./tables.js";

const HEADS = ["engine", "state", "#KV tokens", "#live tokens", "#share", "ranks"];

export class EnginesPage {
  constructor(root, _target, signal) {
    this.signal = signal;
    lists("engines");
    this.up = "#/";
    this.total = h("span", { class: "muted" });
    this.body = h("tbody");
    this.waiting = h("p", { class: "muted" });
    root.append(
      h("div", { class: "bar" }, h("h1", {}, "Engines"), this.total),
      h("table", { class: "list engines", "aria-label": "Engines" },
        tableHead(HEADS), this.body),
      this.waiting,
    );
  }

  stays() {
    return true;
  }

  go() {}

  start() {
    return poll(() => this.refresh(), 2, this.signal);
  }

  async refresh() {
    const found = await get("capacity", {}, this.signal);
    this.total.textContent = found.sessions_fit === null
      ? found.tokens ? `${count(found.tokens)} tokens; how many sessions fit is known once some have ended` : "the size of the KV caches is not known"
      : `${count(found.sessions_fit)} sessions fit: ${count(found.tokens)} tokens, ${count(found.footprint)} a session`;
    this.body.replaceChildren(...found.engines.map(row));
    this.waiting.textContent = found.waiting.length ? `Wait for room: ${found.waiting.map((one) => `${one.place}. ${one.session}`).join(", ")}` : "";
    if (!found.engines.length) this.body.replaceChildren(h("tr", {}, h("td", { colspan: HEADS.length }, note("There is no engine yet."))));
  }
}

function row(engine) {
  const cell = (label, ...children) => h("td", { class: "num", data: { label } }, children);
  const ranks = Object.entries(engine.ranks);
  return h("tr", {},
    h("td", { class: "name" }, engine.url),
    h("td", { data: { label: "state" } }, engine.serves ? "serves" : h("span", { class: "hole" }, "does not serve")),
    cell("KV tokens", engine.tokens === null ? h("small", { class: "hole" }, engine.error || "not read yet") : count(engine.tokens)),
    cell("live tokens", count(engine.live_tokens)),
    cell("share", engine.tokens === null ? null : share(engine.live_tokens, engine.tokens)),
    h("td", { data: { label: "ranks" } }, ranks.length > 1 ? ranks.map(([rank, tokens]) => `${rank}: ${count(tokens)}`).join(", ") : null));
}
