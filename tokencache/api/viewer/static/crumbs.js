// The breadcrumbs: the path from the list of sessions to this page.

import { h } from "./dom.js";

const LISTS = { sessions: "#/", runs: "#/runs", engines: "#/engines" };

/** Show the three lists, one of which is the page itself, in place of breadcrumbs. */
export function lists(name) {
  const links = Object.entries(LISTS).map(([text, href]) => h("a", { href, "aria-current": text === name ? "page" : null }, text));
  document.getElementById("crumbs").replaceChildren(h("span", { class: "lists" }, links));
  document.title = name === "sessions" ? "tokencache" : `${name} · tokencache`;
}

/** Show the breadcrumbs: `[text, href]` for each step. The last step is the page itself. */
export function crumbs(...trail) {
  const items = trail.map(([text, href], i) => (i === trail.length - 1 ? h("span", { "aria-current": "page" }, text) : h("a", { href }, text)));
  document.getElementById("crumbs").replaceChildren(...items.flatMap((item) => [h("span", { class: "slash", "aria-hidden": "true" }, "/"), item]));
  document.title = `${trail.at(-1)[0]} · tokencache`;
}
