// The page of a run: how its rollouts end, what they are worth, how long they are and take, and which policy version sampled them.
// The proxy computes all figures (trajectories/runs.py); this page only draws them.

import { get } from "./api.js";
import { crumbs } from "./crumbs.js";
import { copier, h, note, s, say } from "./dom.js";
import { count, many, moment, readable, reward, share, span } from "./format.js";
import { poll, walkRows } from "./poll.js";
import { term } from "./sessions.js";
import { tableHead } from "./tables.js";

const GROUPS = 200; // a rollout without a group counts as one
const STAGES = {
  passed: "passed",
  missed: "did not pass",
  unrewarded: "no reward",
  failed: "failed",
  running: "running",
  expected: "expected",
};
const PARTS = { calls: "in model calls", between: "between calls", after: "after the last call" };
const VALUES = { reward: "reward", tokens: "sampled tokens", length: "length, in tokens" };

export class RunPage {
  shown = "";

  constructor(root, target, signal) {
    Object.assign(this, { root, signal, kind: target.kind, name: target.session ?? "" });
    this.title = this.name ? `${this.kind} ${this.name}` : "all sessions";
    crumbs(["runs", "#/runs"], [this.title, ""]);
    this.up = "#/runs";
    root.classList.add("run-page");
    this.passing = h("input", { type: "number", step: "any", class: "passing", "aria-label": "A rollout passes if its reward is at least this", onchange: () => this.again({ offset: 0 }) });
    this.failed = h("button", { type: "button", onclick: () => this.again({ failed: !this.asked.failed }) }, "with failed ones");
    this.figures = h("div");
    this.facts = h("span", { class: "muted" });
    root.append(
      h("div", { class: "bar" }, h("h1", {}, readable(this.name ? this.title : "All sessions")), this.name && copier(this.name, `the ${this.kind}`), this.facts, h("span", { class: "grow" }),
        h("label", {}, "passes at ", this.passing), this.failed,
        h("a", { class: "button", href: this.name ? `#/?filter=${encodeURIComponent(term(this.kind, this.name))}` : "#/" }, "sessions")),
      this.figures);
    this.read(target);
  }

  stays(target) {
    return target.kind === this.kind && (target.session ?? "") === this.name;
  }

  /** Take from the address what to count. */
  read({ query }) {
    const passing = Number(query.get("passing") ?? 1);
    this.asked = { passing: Number.isFinite(passing) ? passing : 1, failed: query.get("failed") === "true", offset: Math.max(0, Math.floor(Number(query.get("offset")) || 0)) };
    this.passing.value = this.asked.passing;
    this.failed.setAttribute("aria-pressed", String(this.asked.failed));
    this.failed.title = this.asked.failed ? "failed rollouts are in the distributions: click to leave them out" : "failed rollouts are in no distribution: click to count them, too";
  }

  go(target) {
    this.read(target);
    this.refresh().catch(() => {}); // the next poll reports the error
  }

  again(change) {
    const asked = { ...this.asked, passing: this.passing.value === "" ? 1 : Number(this.passing.value), ...change };
    const query = new URLSearchParams();
    if (asked.passing !== 1) query.set("passing", asked.passing);
    if (asked.failed) query.set("failed", "true");
    if (asked.offset) query.set("offset", asked.offset);
    history.replaceState(null, "", `${location.hash.split("?")[0]}${query.size ? `?${query}` : ""}`);
    this.go({ query });
  }

  async start() {
    await this.refresh(); // an unknown run is reported on the page itself
    await poll(() => this.refresh(), 3, this.signal);
  }

  async refresh() {
    const asked = this.asked;
    const found = await get("runs/report", { ...(this.name ? { [this.kind]: this.name } : {}), ...asked, limit: GROUPS, recent: true }, this.signal);
    if (asked !== this.asked) return; // something was chosen meanwhile
    this.facts.textContent = `${many(found.sessions, "session")}, began ${moment(found.began)}, last used ${moment(found.used)}`;
    const now = JSON.stringify({ ...found, now: 0 });
    if (now === this.shown) return;
    this.shown = now;
    const focused = document.activeElement?.closest?.(".run-page a[href]")?.getAttribute("href");
    const place = window.scrollY;
    this.figures.replaceChildren(
      tiles(found),
      rollouts(found),
      this.pager(found),
      found.moments.length ? h("section", { "aria-label": "Over time" }, h("h2", { class: "part" }, "Over time"), charts(found)) : "",
      ...groups(found),
    );
    window.scrollTo(0, place);
    if (focused) [...this.figures.querySelectorAll("a[href]")].find((link) => link.getAttribute("href") === focused)?.focus({ preventScroll: true });
  }

  pager(found) {
    const last = Math.min(found.offset + GROUPS, found.found);
    if (found.found <= GROUPS && !found.offset) return "";
    return h("div", { class: "pager" },
      h("button", { type: "button", disabled: !found.offset, onclick: () => this.again({ offset: Math.max(0, found.offset - GROUPS) }) }, "‹ newer"),
      h("span", {}, `${found.groups.some((one) => one.group) ? "groups" : "rollouts"} ${count(found.offset + 1)}–${count(last)} of ${count(found.found)} are shown; the figures are of all`),
      h("button", { type: "button", disabled: last >= found.found, onclick: () => this.again({ offset: found.offset + GROUPS }) }, "older ›"));
  }

  key(event) {
    const cells = [...this.root.querySelectorAll("a.cell")];
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step && cells.length) {
      const here = cells.indexOf(document.activeElement);
      const next = cells[Math.min(Math.max(here < 0 ? 0 : here + step, 0), cells.length - 1)];
      next.focus();
      say(next.getAttribute("aria-label"));
      return true;
    }
    return walkRows(event, [...this.root.querySelectorAll("tbody .name a")]);
  }
}

const to = (one) => `#/session/${encodeURIComponent(one.session)}`;
const tile = (name, value, ...more) => h("div", { data: { tile: name } }, h("dt", {}, name), h("dd", {}, value, more.map((one) => h("small", {}, one))));
const range = (one, write) => `± ${write(one.std)}, from ${write(one.least)} to ${write(one.most)}`;
const whole = (value) => count(Math.round(value));

function tiles(found) {
  const { reward: rewards, tokens, length } = found.values;
  const kinds = Object.entries(found.failures).map(([kind, n]) => `${kind} ${count(n)}`).join(", ");
  const waiting = [found.running && `${count(found.running)} running`, found.expected && `${count(found.expected)} expected`, found.retried && `${count(found.retried)} played again`].filter(Boolean);
  return h("dl", { class: "tiles" },
    tile("rollouts", count(found.rollouts), waiting.join(", ")),
    tile("valid", count(found.valid), found.unrewarded ? `${count(found.unrewarded)} without a reward` : share(found.valid, found.valid + found.failed)),
    tile("failed", h("span", { class: found.failed ? "hole" : null }, found.failed ? `✕ ${count(found.failed)}` : "0"), kinds),
    tile("reward", rewards ? reward(rewards.mean) : "–", rewards ? range(rewards, reward) : "of valid rollouts"),
    tile("pass rate", found.pass_rate === null ? "–" : share(found.pass_rate, 1), `${count(found.passed)} with ${reward(found.passing)} or more`),
    tile("groups with equal rewards", found.compared ? `${count(found.equal)} of ${count(found.compared)}` : "–", "nothing to learn from"),
    tile("sampled tokens", tokens ? whole(tokens.mean) : "–", `${count(found.tokens)} in all sessions`),
    tile("length", length ? whole(length.mean) : "–", length ? `up to ${whole(length.most)} tokens` : ""),
    tile("policy version", readable(found.versions.at(-1)?.version ?? "–"), found.versions.length ? many(found.versions.length, "version") : "none is known"));
}

/** One cell for each expected rollout, and what the cells mean. */
function rollouts(found) {
  const counted = { passed: found.passed, missed: found.valid - found.passed - found.unrewarded, unrewarded: found.unrewarded, failed: found.failed, running: found.running, expected: found.expected };
  const legend = Object.entries(STAGES).filter(([stage]) => counted[stage]).map(([stage, text]) =>
    h("li", {}, h("i", { class: `cell s-${stage}`, "aria-hidden": "true" }), text, h("span", { class: "n" }, count(counted[stage]))));
  let first = true;
  const cells = found.groups.map((group) => h("span", { class: group.group ? "cells" : "cells alone" },
    group.rollouts.map((one) => {
      const text = words(one, group);
      const cell = h("a", { class: `cell s-${one.stage}`, href: to(one), title: text, "aria-label": text, tabindex: first ? null : "-1", data: { session: one.session } });
      first = false;
      return cell;
    }),
    Array.from({ length: group.size - group.rollouts.length }, () => h("i", { class: "cell s-expected", title: `${readable(group.group)}: expected, no session yet` }))));
  return h("section", { "aria-label": "Rollouts" },
    h("div", { class: "bar part" }, h("h2", {}, "Rollouts"), h("ul", { class: "legend" }, legend)),
    found.groups.length ? h("div", { class: "rollouts" }, cells) : note("There is no session yet."));
}

/** What a rollout is, in words: for its cell and its points. */
function words(one, group = null) {
  const worth = one.stage === "failed" ? `failed: ${one.failure}${one.detail ? `: ${readable(one.detail)}` : ""}` : one.stage === "running" ? `running for ${span(one.seconds)}${one.open_calls ? ", a call in flight" : ""}` : one.reward === null ? "no reward" : `reward ${reward(one.reward)}`;
  return `${one.session}${group?.group ? ` of ${readable(group.group)}` : ""}\n${worth}\n${many(one.turns, "turn")}, ${count(one.tokens)} tokens${one.version ? `, version ${readable(one.version)}` : ""}`;
}

// --- charts: a point for each rollout on this page, and beside it how all of the run are distributed

function charts(found) {
  const points = found.groups.flatMap((group) => group.rollouts).filter((one) => one.stage !== "running" && (found.with_failed || one.stage !== "failed"));
  const start = found.moments[0].start;
  const end = found.moments.at(-1).end;
  const across = (at) => (end > start ? (100 * (at - start)) / (end - start) : 50);
  const values = Object.entries(VALUES).filter(([name]) => found.values[name]).map(([name, title]) =>
    scatter(title, found.values[name], name === "reward" ? reward : whole, points.filter((one) => one[name] !== null), (one) => one[name], across, means(found, name, across)));
  return [
    h("div", { class: "charts" }, ended(found, start, end), values,
      found.seconds.all ? scatter("time", found.seconds.all, span, points, (one) => one.seconds, across, means(found, "seconds", across)) : "",
      found.versions.length ? versions(found, points, across) : ""),
    h("p", { class: "note ends" }, h("span", {}, moment(start)), h("span", {}, moment(end))),
    found.seconds.all ? phases(found) : "",
  ];
}

const chart = (title, more, high, low, plot, side = "") =>
  h("figure", { class: "chart", data: { chart: title } },
    h("figcaption", {}, h("b", {}, title), h("small", {}, more)),
    h("div", { class: "plot" }, h("span", { class: "high" }, high), h("span", { class: "low" }, low), plot, side));

/** The mean of a value in each part of the time of the whole run: `[where, mean]`. */
const means = (found, name, across) => found.moments.filter((one) => one.means[name] !== undefined).map((one) => [across((one.start + one.end) / 2), one.means[name]]);

function scatter(title, one, write, points, value, across, line) {
  const height = (y) => (one.most > one.least ? (100 * (y - one.least)) / (one.most - one.least) : 50);
  const most = Math.max(...one.bins);
  const bins = one.bins.map((n) => {
    const bar = h("i", { title: many(n, "rollout") });
    bar.style.width = `${(100 * n) / most}%`;
    return bar;
  });
  return chart(title, `mean ${write(one.mean)} ± ${write(one.std)}, median ${write(one.median)}`, write(one.most), one.most > one.least ? write(one.least) : "",
    h("div", { class: "dots" },
      line.length > 1 ? s("svg", { class: "line", viewBox: "0 0 100 100", preserveAspectRatio: "none", "aria-hidden": "true" }, s("polyline", { points: line.map(([x, y]) => `${x},${100 - height(y)}`).join(" ") })) : null,
      points.map((point) => dot(point, across(point.at), height(value(point))))),
    h("div", { class: "bins", role: "img", "aria-label": `${count(one.count)} rollouts; a tenth below ${write(one.p10)}, a tenth above ${write(one.p90)}` }, bins));
}

function dot(one, x, y) {
  const made = h("a", { class: `dot-point s-${one.stage}`, href: to(one), title: words(one), tabindex: "-1", "aria-hidden": "true" });
  made.style.left = `${x}%`;
  made.style.bottom = `${Math.min(Math.max(y, 0), 100)}%`;
  return made;
}

/** How many rollouts ended when, and how. */
function ended(found, start, end) {
  const of = (moment) => Object.values(moment.failures).reduce((a, b) => a + b, 0);
  const most = Math.max(...found.moments.map((one) => one.valid + of(one)), 1);
  const bars = found.moments.map((one) => {
    const kinds = Object.entries(one.failures).map(([kind, n]) => `\n✕ ${kind} ${n}`).join("");
    const column = h("span", { title: `${moment(one.start)}\nvalid ${one.valid}${kinds}` });
    for (const [stage, n] of [["failed", of(one)], ["passed", one.valid]]) {
      const part = h("i", { class: `s-${stage}` });
      part.style.height = `${(100 * n) / most}%`;
      if (n) column.append(part);
    }
    return column;
  });
  const hours = (end - start) / 3600;
  const over = found.valid + found.failed;
  return chart("ended", hours > 0.05 ? `${whole(over / hours)} rollouts an hour` : many(over, "rollout"), count(most), "0", h("div", { class: "columns", role: "img", "aria-label": `${count(found.valid)} valid and ${count(found.failed)} failed` }, bars));
}

function versions(found, points, across) {
  const names = found.versions.map((one) => one.version);
  const height = (name) => (names.length > 1 ? (100 * names.indexOf(name)) / (names.length - 1) : 50);
  return chart("policy version", many(names.length, "version"), readable(names.at(-1)), names.length > 1 ? readable(names[0]) : "",
    h("div", { class: "dots" }, found.versions.map((one) => used(across(one.first), across(one.last), height(one.version))),
      points.filter((one) => names.includes(one.version)).map((one) => dot(one, across(one.at), height(one.version)))));
}

/** A line from the first to the last rollout of a policy version. */
function used(from, until, y) {
  const made = h("i", { class: "used" });
  Object.assign(made.style, { left: `${from}%`, width: `${until - from}%`, bottom: `${y}%` });
  return made;
}

function phases(found) {
  const known = Object.entries(PARTS).filter(([name]) => found.seconds[name]);
  return h("div", { class: "mix phases", data: { chart: "phases" } },
    h("b", {}, "time by part"),
    h("div", { class: "mix-bar", "aria-hidden": "true" }, known.map(([name]) => {
      const part = h("i", { class: `p-${name}` });
      part.style.flexGrow = found.seconds[name].mean;
      return part;
    })),
    h("ul", {}, known.map(([name, text]) => h("li", {}, h("i", { class: `p-${name}` }), `${text} `, h("b", {}, span(found.seconds[name].mean))))));
}

// --- groups

function groups(found) {
  const named = found.groups.filter((one) => one.group);
  if (!named.length) return [];
  const heads = ["group", "over", "#pass rate", "", "#reward", "#failed", "waits for"];
  return [
    h("h2", { class: "part" }, "Groups"),
    h("table", { class: "list groups", "aria-label": "Groups" },
      tableHead(heads),
      h("tbody", {}, named.map((one) => h("tr", { data: { group: one.group } },
        h("td", { class: "name" }, h("a", { href: `#/group/${encodeURIComponent(one.group)}` }, readable(one.group))),
        h("td", { class: "short", data: { label: "over" } }, `${count(one.valid + one.failed)} of ${count(one.size)}`, one.running ? h("small", {}, `, ${count(one.running)} running`) : null),
        h("td", { class: "num", data: { label: "pass rate" } }, one.pass_rate === null ? "–" : share(one.pass_rate, 1)),
        h("td", { class: "bar-cell" }, one.pass_rate === null ? null : bar(one.pass_rate)),
        h("td", { class: "num", data: { label: "reward" } }, reward(one.reward)),
        h("td", { class: "num", data: { label: "failed" } }, one.failed ? h("span", { class: "hole" }, count(one.failed)) : null),
        h("td", { class: "detail", data: { label: "" } }, one.waits ? readable(one.waits.replace(`group ${one.group}: `, "")) : null))))),
  ];
}

function bar(part) {
  const filled = h("i");
  filled.style.width = `${100 * part}%`;
  return h("span", { class: "bar-line passed", "aria-hidden": "true" }, filled);
}
