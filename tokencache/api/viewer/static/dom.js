// Creates elements. Everything in a session is untrusted: strings become text nodes and are never parsed as markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "data") Object.assign(element.dataset, value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false && child !== ""));
  return element;
}

/** An HTML element: `h("a", {href: "#/", class: "x", onclick: f}, "text", child)`. */
export const h = (tag, properties, ...children) => fill(document.createElement(tag), properties, children);

/** An SVG element. */
export const s = (tag, properties, ...children) => fill(document.createElementNS(SVG, tag), properties, children);

/** Announce a text to screen readers. */
export function say(text) {
  document.getElementById("said").textContent = text;
}

/** A button that copies a text. */
export function copier(text, what = "") {
  const button = h("button", { type: "button", class: "copy", title: `Copy ${what || text}`, "aria-label": `Copy ${what || text}` }, sheets());
  button.addEventListener("click", async (event) => {
    event.preventDefault();
    event.stopPropagation();
    await put(text);
    button.replaceChildren("✓");
    say(`${what || text} copied`);
    setTimeout(() => button.replaceChildren(sheets()), 1200);
  });
  return button;
}

const sheets = () =>
  s("svg", { width: 11, height: 11, viewBox: "0 0 11 11", "aria-hidden": "true" },
    s("path", { d: "M3.5 3.5V1h6.5v6.5H7.5M1 3.5h6.5V10H1Z", fill: "none", stroke: "currentColor", "stroke-width": 1.1, "stroke-linejoin": "round" }));

async function put(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text).catch(() => putOld(text));
  return putOld(text);
}

function putOld(text) {
  // without https, browsers offer the clipboard only to pages of this machine
  const area = h("textarea", { class: "visually-hidden" }, text);
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

/** The beginning of an id, and a button that copies all of it. */
export const idText = (id, what) => h("span", { class: "id" }, h("code", { title: id }, id.length > 12 ? `${id.slice(0, 8)}…` : id), copier(id, what));

/** A small colored word. */
export const badge = (word, kind = word, title = "") => h("span", { class: `badge b-${kind}`, title: title || null }, word);

/** A placeholder while data is fetched, or if there is none. */
export const note = (...words) => h("p", { class: "note" }, ...words);
