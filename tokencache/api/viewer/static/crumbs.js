// The way from the list of all sessions to where one is.

import { h } from "./dom.js";

/** Show it: `[text, href]` for each step, the last of which is the page itself. */
export function crumbs(...trail) {
  const items = trail.map(([text, href], i) => (i === trail.length - 1 ? h("span", { "aria-current": "page" }, text) : h("a", { href }, text)));
  document.getElementById("crumbs").replaceChildren(...items.flatMap((item) => [h("span", { class: "slash", "aria-hidden": "true" }, "/"), item]));
  document.title = trail.length ? `${trail.at(-1)[0]} · tokencache` : "tokencache";
}
