// The list of runs: the sessions with one tag `run:ID` each.

import { get } from "./api.js";
import { lists } from "./crumbs.js";
import { copier, h, note } from "./dom.js";
import { ago, count, many, moment, readable, reward, share } from "./format.js";
import { poll, walkRows } from "./poll.js";
import { tableHead } from "./tables.js";

const HEADS = ["run", "#rollouts", "", "#running", "#valid", "#failed", "#reward", "version", "last used", "began"];

export class RunsPage {
  constructor(root, _target, signal) {
    this.signal = signal;
    lists("runs");
    this.up = "#/";
    this.total = h("span", { class: "muted" });
    this.body = h("tbody");
    root.append(
      h("div", { class: "bar" }, h("h1", {}, "Runs"), this.total, h("span", { class: "grow" }), h("a", { class: "button", href: "#/run" }, "all sessions as one run")),
      h("table", { class: "list runs", "aria-label": "Runs" },
        tableHead(HEADS), this.body),
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
    const { runs } = await get("runs", { recent: true }, this.signal);
    const now = Date.now() / 1000;
    const focused = document.activeElement?.closest?.("tbody a")?.getAttribute("href");
    this.total.textContent = many(runs.length, "run");
    this.body.replaceChildren(...runs.map((one) => row(one, now)));
    if (focused) [...this.body.querySelectorAll("a")].find((link) => link.getAttribute("href") === focused)?.focus();
    if (!runs.length) this.body.replaceChildren(h("tr", {}, h("td", { colspan: HEADS.length }, note("No session has a tag ", h("code", {}, "run:ID"), " yet. The integrations of trainers set it; so does ", h("code", {}, 'client.create(tags=["run:ID"])'), "."))));
  }

  key(event) {
    return walkRows(event, [...this.body.querySelectorAll(".name a")]);
  }
}

function row(one, now) {
  const cell = (label, ...children) => h("td", { class: "num", data: { label } }, children);
  return h("tr", { data: { run: one.run } },
    h("td", { class: "name" }, h("a", { href: `#/run/${encodeURIComponent(one.run)}` }, readable(one.run)), copier(one.run, "the run's id")),
    cell("rollouts", count(one.rollouts)),
    h("td", { class: "bar-cell" }, parts(one)),
    cell("running", one.running ? count(one.running) : null),
    cell("valid", count(one.valid)),
    cell("failed", one.failed ? h("span", { class: "hole" }, count(one.failed), h("small", {}, ` ${share(one.failed, one.failed + one.valid)}`)) : null),
    cell("reward", reward(one.reward)),
    h("td", { data: { label: "version" } }, readable(one.version)),
    h("td", { class: "short", data: { label: "last used" }, title: moment(one.used) }, ago(now - one.used)),
    h("td", { class: "short muted", data: { label: "began" } }, moment(one.began)));
}

/** A bar: valid, failed and running rollouts. */
function parts(one) {
  const widths = { passed: one.valid, failed: one.failed, running: one.running };
  return h("span", { class: "part-bar", "aria-hidden": "true" }, Object.entries(widths).filter(([, n]) => n).map(([stage, n]) => {
    const part = h("i", { class: `s-${stage}` });
    part.style.flexGrow = n;
    return part;
  }));
}
