// The breadcrumbs: the path from the list of sessions to this page.

import { h } from "./dom.js";

/** Show the breadcrumbs: `[text, href]` for each step. The last step is the page itself. */
export function crumbs(...trail) {
  const items = trail.map(([text, href], i) => (i === trail.length - 1 ? h("span", { "aria-current": "page" }, text) : h("a", { href }, text)));
  document.getElementById("crumbs").replaceChildren(...items.flatMap((item) => [h("span", { class: "slash", "aria-hidden": "true" }, "/"), item]));
  document.title = trail.length ? `${trail.at(-1)[0]} · tokencache` : "tokencache";
}
