// Selects the page by the part of the address after `#`, and handles what all pages share: theme and keys.
//
//   #/                                     all sessions; ?filter=…&state=…&sort=…
//   #/runs                                 all runs
//   #/engines                              the engines, and how many sessions fit
//   #/run/ID                               the figures of a run; ?passing=0.5&failed=true&offset=100; without ID: of all sessions
//   #/tag/NAME                             the same for all sessions with a tag
//   #/group/NAME                           the sessions of a group, compared
//   #/session/NAME                         one session; ?tab=sequences|incidents|forgiven
//   #/session/NAME/turn/ID                 the same, with a turn open next to it
//   #/session/NAME/sequence/ID?token=12    a sequence's tokens

import { h, note } from "./dom.js";
import { EnginesPage } from "./engines.js";
import { GroupPage } from "./group.js";
import { RunPage } from "./run.js";
import { RunsPage } from "./runs.js";
import { SequencePage } from "./sequence.js";
import { SessionPage } from "./session.js";
import { SessionsPage } from "./sessions.js";
import { COLORS } from "./words.js";

const main = document.getElementById("main");
const KEYS = [
  ["/", "focus the filter, or the token number"],
  ["j k or ↓ ↑", "next, previous row; in a sequence j, k: next, previous message"],
  ["Enter", "open"],
  ["u", "up: from a sequence to its session, from a session to the list"],
  ["← →", "in a sequence: previous, next token; in a run: previous, next rollout"],
  ["Home End", "in a sequence: first, last token"],
  ["[ ]", "in a sequence: previous, next turn"],
  ["n p", "in a sequence: next, previous place where a plain rendering differs"],
  ["h", "in a sequence: color tokens by probability"],
  ["t", "light, dark, or system colors"],
  ["?", "this list"],
];

let page = null;
let leaving = new AbortController();

function where() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  let parts;
  try {
    parts = path.split("/").map(decodeURIComponent);
  } catch {
    parts = [""];
  }
  return { parts, query: new URLSearchParams(query ?? "") };
}

function route() {
  const { parts, query } = where();
  const [kind, session, what, id] = parts;
  const target = { kind, session, what, id, query };
  const pages = { group: GroupPage, engines: EnginesPage, runs: RunsPage, run: RunPage, tag: RunPage, session: what === "sequence" ? SequencePage : SessionPage };
  const wanted = Object.hasOwn(pages, kind) ? pages[kind] : SessionsPage;
  if (page instanceof wanted && page.stays(target)) {
    page.go(target);
    return;
  }
  leaving.abort();
  leaving = new AbortController();
  const root = h("div", { class: "page" });
  main.replaceChildren(root);
  window.scrollTo(0, 0);
  document.getElementById("pulse").textContent = "";
  main.focus({ preventScroll: true });
  page = new wanted(root, target, leaving.signal);
  page.start().catch((why) => {
    if (why.name === "AbortError") return;
    root.replaceChildren(h("div", { class: "failed", role: "alert" }, h("h1", {}, why.status === 404 ? "Not found" : "Error"), note(why.message)));
  });
}

// --- theme

const THEMES = { auto: ["◐", "system"], light: ["☀", "light"], dark: ["☾", "dark"] };
const button = document.getElementById("theme");

function setTheme(name) {
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  button.textContent = THEMES[name][0];
  button.title = `Colors: ${THEMES[name][1]} (t)`;
  button.setAttribute("aria-label", button.title);
  button.dataset.name = name;
}

function nextTheme() {
  const names = Object.keys(THEMES);
  const name = names[(names.indexOf(button.dataset.name) + 1) % names.length];
  localStorage.setItem("tokencache.theme", name);
  setTheme(name);
}

// --- keys

const help = document.getElementById("help");
document.getElementById("help-list").append(...KEYS.flatMap(([key, what]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, what)]));
document.getElementById("color-list").append(...Object.entries(COLORS).flatMap(([name, what]) => [h("dt", {}, h("i", { class: `c-${name}` })), h("dd", {}, what)]));
document.getElementById("keys").addEventListener("click", () => help.showModal());
button.addEventListener("click", nextTheme);

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  const typing = event.target.closest?.("input, select, textarea");
  if (typing) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  if (event.key === "?") help.showModal();
  else if (event.key === "t") nextTheme();
  else if (event.key === "u" && page?.up !== undefined) location.hash = page.up;
  else if (!page?.key?.(event)) return;
  event.preventDefault();
});

setTheme(Object.hasOwn(THEMES, localStorage.getItem("tokencache.theme")) ? localStorage.getItem("tokencache.theme") : "auto");
window.addEventListener("hashchange", route);
route();
