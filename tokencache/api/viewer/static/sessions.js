// The list of sessions, in pages of 100 rows, refreshed every two seconds.

import { get } from "./api.js";
import { crumbs } from "./crumbs.js";
import { badge, copier, h, note } from "./dom.js";
import { ago, count, many, moment, span } from "./format.js";
import { poll, walkRows } from "./poll.js";

const ROWS = 100;
const STATES = [
  ["any", "all"],
  ["live", "live"],
  ["incomplete", "incomplete"],
  ["complete", "complete"],
  ["incidents", "with incidents"],
  ["sealed", "sealed"],
];

export class SessionsPage {
  offset = 0;
  state = "any";
  shown = "";

  constructor(root, target, signal) {
    this.signal = signal;
    crumbs();
    this.filter = h("input", {
      type: "search", id: "filter", placeholder: "filter by name   /", "aria-label": "Filter sessions by name",
      spellcheck: "false", value: target.query.get("contains") ?? "", oninput: () => this.again(),
    });
    this.states = h("div", { class: "choices", role: "group", "aria-label": "Which sessions" });
    this.body = h("tbody");
    this.pager = h("div", { class: "pager" });
    this.total = h("span", { class: "muted" });
    const head = ["session", "state", "turns", "open", "incidents", "last used", "age"];
    root.append(
      h("div", { class: "bar" }, h("h1", {}, "Sessions"), this.total, h("span", { class: "grow" }), this.states, this.filter),
      h("table", { class: "list" },
        h("thead", {}, h("tr", {}, head.map((name) => h("th", { scope: "col", class: ["turns", "open"].includes(name) ? "num" : null }, name)))),
        this.body),
      this.pager,
    );
  }

  stays() {
    return true;
  }

  go() {}

  start() {
    return poll(() => this.refresh(), 2, this.signal);
  }

  again(offset = 0) {
    this.offset = offset;
    this.refresh().catch(() => {}); // the next poll reports the error
  }

  async refresh() {
    const asked = { contains: this.filter.value, state: this.state, offset: this.offset, limit: ROWS };
    const found = await get("summaries", asked, this.signal);
    if (asked.contains !== this.filter.value || asked.state !== this.state || asked.offset !== this.offset) return; // the filter changed meanwhile
    this.show(found);
  }

  show(found) {
    this.total.textContent = found.found === found.total ? many(found.total, "session") : `${count(found.found)} of ${many(found.total, "session")}`;
    this.states.replaceChildren(...STATES.map(([name, text]) =>
      h("button", { type: "button", "aria-pressed": String(name === this.state), onclick: () => ((this.state = name), this.again()) },
        text, h("span", { class: "n" }, count(found.states[name])))));
    const last = Math.min(found.offset + ROWS, found.found);
    this.pager.replaceChildren(
      h("button", { type: "button", disabled: !found.offset, onclick: () => this.again(Math.max(0, found.offset - ROWS)) }, "‹ newer"),
      h("span", {}, found.found ? `${count(found.offset + 1)}–${count(last)} of ${count(found.found)}` : "none"),
      h("button", { type: "button", disabled: last >= found.found, onclick: () => this.again(found.offset + ROWS) }, "older ›"),
    );
    const focused = document.activeElement?.closest?.("tbody a")?.getAttribute("href");
    this.body.replaceChildren(...found.sessions.map((one) => row(one, found.now)));
    if (focused) [...this.body.querySelectorAll("a")].find((link) => link.getAttribute("href") === focused)?.focus();
    if (!found.sessions.length) {
      const why = found.total ? "No session matches." : "No session yet. Point a harness at this proxy, and its turns appear here.";
      this.body.replaceChildren(h("tr", {}, h("td", { colspan: 7 }, note(why))));
    }
  }

  key(event) {
    if (event.key === "/") return this.filter.focus(), true;
    return walkRows(event, [...this.body.querySelectorAll("a")]);
  }
}

function row(one, now) {
  const href = `#/session/${encodeURIComponent(one.session)}`;
  const incidents = Object.entries(one.incidents);
  const states = [
    one.open_calls ? badge("live", "live", `the oldest open call began ${span(now - one.since)} ago`) : null,
    one.complete ? badge("complete") : one.open_calls && !incidents.length ? null : badge("incomplete", "incomplete", "a reply of the model is missing or still to come"),
    one.sealed ? badge("sealed", "sealed", "accepts no more calls") : null,
  ];
  return h("tr", { data: { session: one.session } },
    h("td", { class: "name" }, h("a", { href }, one.session), copier(one.session)),
    h("td", {}, states),
    h("td", { class: "num" }, count(one.turns)),
    h("td", { class: "num" }, one.open_calls ? count(one.open_calls) : h("span", { class: "muted" }, "–")),
    h("td", {}, incidents.map(([kind, n]) => badge(n > 1 ? `${kind} ×${n}` : kind, "incident"))),
    h("td", { title: moment(one.used) }, ago(now - one.used)),
    h("td", { title: moment(one.created) }, ago(now - one.created)));
}
