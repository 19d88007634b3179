// The list of sessions, in pages of 100 rows, refreshed every two seconds. The filter, the state and the order are in the address.

import { ApiError, get } from "./api.js";
import { lists } from "./crumbs.js";
import { badge, copier, h, note } from "./dom.js";
import { ago, count, many, moment, readable, reward, span } from "./format.js";
import { FILTERS } from "./meanings.js";
import { poll, walkRows } from "./poll.js";

const ROWS = 100;
const TAGS = 3; // tags that a row shows
const STATES = {
  any: "all",
  live: "live",
  open: "open",
  finished: "finished",
  sealed: "sealed",
  complete: "complete",
  incomplete: "incomplete",
  failed: "failed",
  incidents: "with incidents",
};
// by the name of its order: label, and whether the largest value comes first at first
const COLUMNS = {
  session: ["session", false],
  state: ["state", false],
  group: ["group", false],
  reward: ["reward", true],
  harness: ["harness", false],
  model: ["model", false],
  turns: ["turns", true],
  tokens: ["tokens", true],
  used: ["last used", true],
  created: ["began", true],
};
const NUMBERS = new Set(["reward", "turns", "tokens"]);

/**
 * Split what was typed into terms such as `group:math-17` or `tag:"two words"`, and the rest, which is a part of the name. A name that looks
 * like a term is written in quotes. Throws an error that names an unknown term.
 */
export function parse(typed) {
  const asked = {};
  const rest = typed.replace(/(\w+):(?:"((?:[^"]|"")*)"|(\S+))|"([^"]*)"/g, (_, name, quoted, plain, part) => {
    if (part !== undefined) return part;
    if (!FILTERS.includes(name)) throw new Error(`There is no filter ${name}. The filters are ${FILTERS.join(", ")}. Write a name that has a colon in quotes.`);
    asked[name] = quoted?.replaceAll('""', '"') ?? plain;
    return "";
  });
  return { ...asked, contains: rest.trim() };
}

/** A term of the filter, with quotes if it needs them; a quote within them is doubled. */
export const term = (name, value) => `${name}:${/[\s"]/.test(value) ? `"${value.replaceAll('"', '""')}"` : value}`;

export class SessionsPage {
  offset = 0;

  constructor(root, target, signal) {
    this.signal = signal;
    lists("sessions");
    this.filter = h("input", {
      type: "search", id: "filter", placeholder: "name, outcome:…, reward:>0   /", "aria-label": `Filter sessions by name, or by ${FILTERS.map((one) => `${one}:`).join(" ")}`,
      title: `${FILTERS.map((one) => `${one}:`).join(" ")}\nNumbers: reward:1, turns:>3, tokens:100..200, reward:none`, "aria-describedby": "wrong",
      spellcheck: "false", oninput: () => this.again(),
    });
    this.wrong = h("p", { class: "error", id: "wrong", role: "alert" });
    this.states = h("div", { class: "choices", role: "group", "aria-label": "Which sessions" });
    this.heads = h("tr");
    this.order = h("select", { "aria-label": "Order", class: "order", onchange: () => this.sortBy(this.order.value) },
      Object.entries(COLUMNS).flatMap(([name, [label]]) => [h("option", { value: name }, `${label} ↑`), h("option", { value: `-${name}` }, `${label} ↓`)]));
    this.body = h("tbody");
    this.pager = h("div", { class: "pager" });
    this.total = h("span", { class: "muted" });
    root.append(
      h("div", { class: "bar" }, h("h1", {}, "Sessions"), this.total, h("span", { class: "grow" }), this.filter, this.order),
      this.wrong,
      h("div", { class: "bar" }, this.states),
      h("table", { class: "list sessions" }, h("thead", {}, this.heads), this.body),
      this.pager,
    );
    this.read(target);
  }

  /** Take the filter, the state and the order from the address. */
  read({ query }) {
    const [state, sort] = [query.get("state"), query.get("sort")];
    this.filter.value = query.get("filter") ?? query.get("contains") ?? "";
    this.state = Object.hasOwn(STATES, state) ? state : "any";
    this.sort = Object.hasOwn(COLUMNS, (sort ?? "").replace("-", "")) ? sort : "-used";
    this.showOrder();
  }

  stays() {
    return true;
  }

  go(target) {
    this.read(target);
    this.again();
  }

  start() {
    return poll(() => this.refresh(), 2, this.signal);
  }

  again(offset = 0) {
    this.offset = offset;
    const query = new URLSearchParams();
    if (this.filter.value) query.set("filter", this.filter.value);
    if (this.state !== "any") query.set("state", this.state);
    if (this.sort !== "-used") query.set("sort", this.sort);
    history.replaceState(null, "", query.size ? `#/?${query}` : "#/");
    this.refresh().catch(() => {}); // the next poll reports the error
  }

  sortBy(sort) {
    this.sort = sort;
    this.showOrder();
    this.again();
  }

  showOrder() {
    const [name, falls] = [this.sort.replace("-", ""), this.sort.startsWith("-")];
    this.order.value = this.sort;
    const focused = document.activeElement?.closest?.("th")?.dataset.column;
    this.heads.replaceChildren(...Object.entries(COLUMNS).map(([column, [label, largest]]) => {
      const next = column === name ? (falls ? column : `-${column}`) : `${largest ? "-" : ""}${column}`;
      return h("th", { scope: "col", class: NUMBERS.has(column) ? "num" : null, data: { column }, "aria-sort": column === name ? (falls ? "descending" : "ascending") : null },
        h("button", { type: "button", title: `sort by ${label}`, onclick: () => this.sortBy(next) }, label, h("span", { "aria-hidden": "true" }, column === name ? (falls ? " ↓" : " ↑") : "")));
    }));
    if (focused) this.heads.querySelector(`[data-column="${focused}"] button`)?.focus();
  }

  /** Add a term to the filter, in place of one of the same name. */
  narrow(name, value) {
    const others = this.filter.value.replaceAll(new RegExp(`\\b${name}:(?:"(?:[^"]|"")*"|\\S+)\\s*`, "g"), "").trim();
    this.filter.value = `${others} ${term(name, value)}`.trim();
    this.again();
  }

  async refresh() {
    const now = JSON.stringify([this.filter.value, this.state, this.sort, this.offset]);
    this.asked = now;
    let found, wrong = "";
    try {
      found = await get("summaries", { ...parse(this.filter.value), state: this.state, sort: this.sort, offset: this.offset, limit: ROWS }, this.signal);
    } catch (why) {
      if (why instanceof ApiError && why.status !== 400) throw why;
      if (why.name === "AbortError") throw why;
      wrong = why.message;
    }
    if (this.asked !== now) return; // something was chosen meanwhile
    this.wrong.textContent = wrong;
    this.filter.setAttribute("aria-invalid", String(Boolean(wrong)));
    if (found) this.show(found);
  }

  show(found) {
    this.total.textContent = found.found === found.total ? many(found.total, "session") : `${count(found.found)} of ${many(found.total, "session")}`;
    this.states.replaceChildren(...Object.entries(STATES).map(([name, text]) =>
      h("button", { type: "button", "aria-pressed": String(name === this.state), onclick: () => ((this.state = name), this.again()) },
        text, h("span", { class: "n" }, count(found.states[name])))));
    const last = Math.min(found.offset + ROWS, found.found);
    this.pager.replaceChildren(
      h("button", { type: "button", disabled: !found.offset, onclick: () => this.again(Math.max(0, found.offset - ROWS)) }, "‹ previous"),
      h("span", {}, found.found ? `${count(found.offset + 1)}–${count(last)} of ${count(found.found)}` : "none"),
      h("button", { type: "button", disabled: last >= found.found, onclick: () => this.again(found.offset + ROWS) }, "next ›"),
    );
    const focused = document.activeElement?.closest?.("tbody a")?.getAttribute("href");
    this.body.replaceChildren(...found.sessions.map((one) => this.row(one, found.now)));
    if (focused) [...this.body.querySelectorAll("a")].find((link) => link.getAttribute("href") === focused)?.focus();
    if (!found.sessions.length) {
      const why = found.total ? "No session matches." : "No session yet. Point a harness at this proxy, and its turns appear here.";
      this.body.replaceChildren(h("tr", {}, h("td", { colspan: Object.keys(COLUMNS).length }, note(why))));
    }
  }

  key(event) {
    if (event.key === "/") return this.filter.focus(), true;
    return walkRows(event, [...this.body.querySelectorAll(".name a")]);
  }

  row(one, now) {
    const narrow = (name, value) => value && h("button", { type: "button", class: "term", title: `only ${term(name, value)}`, onclick: () => this.narrow(name, value) }, readable(value));
    const cell = (name, ...children) => h("td", { class: NUMBERS.has(name) ? "num" : null, data: { label: COLUMNS[name][0] } }, children);
    return h("tr", { data: { session: one.session } },
      h("td", { class: "name" }, h("a", { href: `#/session/${encodeURIComponent(one.session)}` }, one.session), copier(one.session)),
      h("td", {}, states(one, now)),
      cell("group", one.group && h("a", { href: `#/group/${encodeURIComponent(one.group)}` }, readable(one.group)), one.tags.slice(0, TAGS).map((tag) => narrow("tag", tag)),
        one.tags.length > TAGS ? h("small", { title: one.tags.map(readable).join("\n") }, ` +${one.tags.length - TAGS}`) : null),
      cell("reward", reward(one.reward)),
      h("td", { class: "short", data: { label: "harness" } }, narrow("harness", one.harness)),
      cell("model", narrow("model", one.model)),
      cell("turns", count(one.turns)),
      cell("tokens", count(one.tokens)),
      h("td", { title: moment(one.used), data: { label: "last used" } }, ago(now - one.used)),
      h("td", { title: moment(one.created), data: { label: "began" } }, ago(now - one.created)));
  }
}

/** The badge of a rollout that ended with a failure; none if it did not. */
export const failure = (one) => (one.outcome === "ok" ? null : badge(one.outcome, "failed", `the rollout failed, so that nobody trains it: ${readable(one.outcome_detail || one.outcome)}`));

/** The badges of a session: its state, whether it is complete, how it failed, and its incidents. */
export function states(one, now) {
  const incidents = Object.entries(one.incidents);
  return [
    one.open_calls ? badge(`live · ${count(one.open_calls)}`, "live", `${many(one.open_calls, "call")} in flight; the oldest began ${span(now - one.since)} ago`) : null,
    one.state === "open" ? null : badge(one.state, one.state, one.state === "sealed" ? "its record does not change any more" : "accepts no more calls"),
    one.complete ? badge("complete") : one.open_calls && !incidents.length ? null : badge("incomplete", "incomplete", "a reply of the model is missing or still to come"),
    failure(one),
    incidents.map(([kind, n]) => badge(n > 1 ? `${kind} ×${n}` : kind, "incident")),
  ];
}
