// The page of a group: its sessions with rewards, advantages and failures, their last answers, and where their tokens part.

import { get } from "./api.js";
import { crumbs } from "./crumbs.js";
import { copier, h, note } from "./dom.js";
import { count, many, readable, reward, visible } from "./format.js";
import { poll, walkRows } from "./poll.js";
import { failure, states } from "./sessions.js";
import { tableHead } from "./tables.js";

export class GroupPage {
  shown = "";
  forks = false; // whether the forks are unfolded

  constructor(root, target, signal) {
    Object.assign(this, { root, signal, name: target.session });
    crumbs(["sessions", "#/"], [`group ${this.name}`, ""]);
    this.up = "#/";
    root.classList.add("group-page");
  }

  stays(target) {
    return target.session === this.name;
  }

  go() {}

  async start() {
    await this.refresh(); // an unknown group is reported on the page itself
    await poll(() => this.refresh(), 5, this.signal);
  }

  async refresh() {
    const found = await get("comparison", { group: this.name }, this.signal);
    const now = JSON.stringify(found);
    if (now === this.shown) return;
    this.shown = now;
    const members = [...found.members].sort((a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity) || (a.session < b.session ? -1 : 1));
    const rewarded = members.filter((one) => one.reward !== null).length;
    this.root.replaceChildren(
      h("div", { class: "bar" }, h("h1", {}, readable(this.name)), copier(this.name, "the group's name"), h("span", { class: "muted" }, many(found.found, "session"), found.waits ? `: ${readable(found.waits.replace(`group ${this.name}: `, ""))}` : "")),
      h("dl", { class: "tiles" },
        tile("reward", ...spread(found.values.reward), `${count(rewarded)} of ${many(members.length, "session")} rewarded`),
        tile("trainable tokens", ...spread(found.values.trainable)),
        tile("length, in tokens", ...spread(found.values.length)),
        tile("turns", ...spread(found.values.turns)),
        tile("shared at the beginning", count(found.shared), found.parting ? "tokens" : "tokens: the sequences are equal")),
      members.length || found.not_compared.length ? table(members, found.not_compared) : "",
      found.not_compared.length ? note(`Not compared: ${many(found.found - members.length, "session")} without turns, with damaged records, or beyond the 64 that were used last: ${found.not_compared.map((one) => readable(one.session)).join(", ")}.`) : "",
      members.length ? answers(members) : "",
      h("details", { class: "forks", open: this.forks, ontoggle: (event) => (this.forks = event.target.open) },
        h("summary", {}, h("h2", { class: "part" }, "Where their tokens part")),
        found.parting ? parting(found.parting, new Map(members.map((one) => [one.session, one]))) : note(members.length > 1 ? "Nowhere: the compared sequences are equal." : "There is only one session.")),
    );
  }

  key(event) {
    return walkRows(event, [...this.root.querySelectorAll("tbody .name a")]);
  }
}

const tile = (name, value, ...more) => h("div", { data: { tile: name } }, h("dt", {}, name), h("dd", {}, value, more.map((one) => h("small", {}, one))));

/** The mean of the sessions that did not fail, and the standard deviation with the smallest and the largest value. */
function spread(one) {
  return one ? [reward(one.mean), `± ${reward(one.std)}, from ${reward(one.least)} to ${reward(one.most)}`] : ["–"];
}

/** An advantage, with its sign; empty if there is none. */
const signed = (value) => (value === null ? null : `${value > 0 ? "+" : ""}${reward(value).replace("-", "−")}`);

/** The last answers side by side, in the order of the table. */
function answers(members) {
  return h("section", { "aria-label": "Last answers" },
    h("h2", { class: "part" }, "Last answers"),
    h("div", { class: "answers" }, members.map((one) =>
      h("article", { data: { session: one.session } },
        h("header", {}, h("a", { href: `#/session/${encodeURIComponent(one.session)}` }, one.session), failure(one) ?? h("b", {}, reward(one.reward)),
          one.advantage === null ? null : h("span", { class: "n", title: "its advantage over the valid sessions with a reward: (reward − mean) / deviation" }, signed(one.advantage))),
        failure(one) && one.outcome_detail ? h("p", { class: "hole" }, readable(one.outcome_detail)) : null,
        one.answer ? h("pre", { tabindex: "0" }, readable(one.answer)) : one.thought ? h("pre", { class: "muted", tabindex: "0", title: "only reasoning" }, readable(one.thought)) : note("an empty reply")))));
}

function table(members, others) {
  const now = Date.now() / 1000;
  const heads = ["session", "state", "#reward", "", "#advantage", "#turns", "#trainable", "#length"];
  const low = Math.min(0, ...members.map((one) => one.reward ?? 0));
  const high = Math.max(0, ...members.map((one) => one.reward ?? 0));
  const longest = Math.max(...members.map((one) => one.length), 1);
  return h("table", { class: "list", "aria-label": "Sessions of the group" },
    tableHead(heads),
    h("tbody", {}, members.map((one) =>
      h("tr", { data: { session: one.session } },
        h("td", { class: "name" }, h("a", { href: `#/session/${encodeURIComponent(one.session)}` }, one.session), copier(one.session)),
        h("td", {}, states(one, now)),
        h("td", { class: "num", data: { label: "reward" } }, reward(one.reward)),
        h("td", { class: "bar-cell" }, one.reward === null || high === low ? null : bar((Math.min(one.reward, 0) - low) / (high - low), Math.abs(one.reward) / (high - low))),
        h("td", { class: "num", data: { label: "advantage" } }, signed(one.advantage)),
        h("td", { class: "num", data: { label: "turns" } }, count(one.turns)),
        h("td", { class: "num", data: { label: "trainable" } }, count(one.trainable)),
        h("td", { class: "num", data: { label: "length" } },
          h("a", { href: `#/session/${encodeURIComponent(one.session)}/sequence/${encodeURIComponent(one.sequence)}` }, count(one.length)), bar(0, one.length / longest)))), others.map((one) =>
      h("tr", { class: "dim", data: { session: one.session } },
        h("td", { class: "name" }, h("a", { href: `#/session/${encodeURIComponent(one.session)}` }, one.session), copier(one.session)),
        h("td", {}, states(one, now)),
        h("td", { class: "num", data: { label: "reward" } }, reward(one.reward)),
        h("td", { class: "detail", colspan: 5 }, one.outcome === "ok" ? null : readable(one.outcome_detail))))));
}

function bar(from, part) {
  const filled = h("i");
  filled.style.marginLeft = `${100 * from}%`;
  filled.style.width = `${100 * part}%`;
  return h("span", { class: "bar-line", "aria-hidden": "true" }, filled);
}

const oneLine = (text) => visible(text).replaceAll("\n", "");

/** A parting and, below each of its branches, the next one. */
function parting(one, members) {
  const sampled = one.kind === "sampled" || one.kind === "unscored";
  const where = `token ${count(one.at)}, message ${one.message}${one.role ? ` (${one.role})` : ""}, ${sampled ? "sampled in" : "in the prompt of"} turn ${one.turn}`;
  return h("section", { class: "parting" },
    h("p", {}, h("b", {}, where), h("span", { class: "muted" }, `: ${many(one.branches.length, "way")}, after `), h("code", {}, oneLine(one.before))),
    h("ul", {}, one.branches.map((branch) =>
      h("li", {},
        h("p", { class: "branch-text" }, branch.ends ? h("span", { class: "muted" }, "ends here") : h("ins", {}, oneLine(branch.text))),
        h("p", { class: "branch-names" }, branch.sessions.map((name) => {
          const member = members.get(name);
          const token = Math.min(one.at, Math.max(member.length - 1, 0));
          return h("a", { href: `#/session/${encodeURIComponent(name)}/sequence/${encodeURIComponent(member.sequence)}?token=${token}` }, name, h("span", { class: "n" }, reward(member.reward)));
        })),
        branch.parting ? parting(branch.parting, members) : branch.sessions.length > 1 ? note("equal to the end") : null))));
}
