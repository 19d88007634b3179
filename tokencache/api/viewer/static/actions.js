// The actions of a session: export, finish, seal and delete. Each but the export asks first. A refusal is shown as the proxy words it; a seal
// that it refuses can then be forced.

import { at, download, send } from "./api.js";
import { h, say } from "./dom.js";
import { FORMATS } from "./meanings.js";

const FORCEABLE = ["session_open", "calls_in_flight"];

/** The buttons of a session. `changed()` is called after an action, `gone()` after a deletion. */
export class Actions {
  constructor(name, { signal, changed, gone }) {
    Object.assign(this, { name, signal, changed, gone });
    this.format = h("select", { "aria-label": "Export format" }, FORMATS.map((format) => h("option", { value: format }, format)));
    this.format.value = "native";
    const button = (text, onclick, kind = null) => h("button", { type: "button", class: kind, onclick }, text);
    this.exportButton = button("export", () => this.export());
    this.finishButton = button("finish", () => this.finish());
    this.sealButton = button("seal", () => this.seal());
    this.deleteButton = button("delete", () => this.delete(), "danger");
    this.failure = h("span", { class: "error", role: "alert" });
    this.element = h("div", { class: "actions", role: "group", "aria-label": "Actions" },
      h("span", { class: "joined" }, this.format, this.exportButton), this.finishButton, this.sealButton, this.deleteButton, this.failure);
  }

  /** Allow what the state of the session allows. */
  update({ state, turns }) {
    this.turns = turns.length;
    this.finishButton.disabled = state !== "open";
    this.sealButton.disabled = state === "sealed";
  }

  async export() {
    this.exportButton.disabled = true;
    this.failure.textContent = "";
    try {
      const body = await download(at(this.name, "trajectories"), { format: this.format.value }, this.signal);
      const link = h("a", { href: URL.createObjectURL(body), download: `${this.name}.${this.format.value}.json` });
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 60_000); // some browsers read it later
      say("exported");
    } catch (why) {
      if (why.name !== "AbortError") this.failure.textContent = why.message;
    }
    this.exportButton.disabled = false;
  }

  finish() {
    ask({
      title: `Finish ${this.name}?`,
      words: "The rollout is over: the session accepts no more calls. Calls in flight end as usual and are recorded. This cannot be undone.",
      choices: [{ label: "Finish", run: () => send("POST", at(this.name, "finish"), {}, this.signal) }],
      done: this.changed,
    });
  }

  seal() {
    const seal = (force) => send("POST", at(this.name, "seal"), force ? { force: true } : {}, this.signal);
    ask({
      title: `Seal ${this.name}?`,
      words: "What is recorded does not change any more. A session must be finished first, and no call may be in flight. This cannot be undone.",
      choices: [
        { label: "Seal", run: () => seal(false) },
        { label: "Seal by force", danger: true, after: FORCEABLE, words: "Force seals it all the same. If something is cut off, the session is marked as incomplete.", run: () => seal(true) },
      ],
      done: this.changed,
    });
  }

  delete() {
    ask({
      title: `Delete ${this.name}?`,
      words: `Its ${this.turns === 1 ? "turn" : `${this.turns} turns`}, tokens, rewards and incidents are lost. New calls of the session are refused for an hour. This cannot be undone.`,
      choices: [{ label: "Delete", danger: true, run: () => send("DELETE", at(this.name), {}, this.signal) }],
      done: this.gone,
    });
  }
}

/**
 * Ask before an action. The first choice is offered at once; one with `after` only when a choice before it fails with an error of such a
 * kind, whose message is shown.
 */
function ask({ title, words, choices, done }) {
  const dialog = document.getElementById("confirm");
  const failure = h("p", { class: "error", role: "alert" });
  const more = h("p", { class: "note" });
  const row = h("div", { class: "bar" });
  const offer = (offered) => row.replaceChildren(
    ...offered.map((choice) => h("button", { type: "button", class: choice.danger ? "danger" : "primary", onclick: (event) => attempt(choice, event.currentTarget) }, choice.label)),
    h("button", { type: "button", onclick: () => dialog.close() }, "Cancel"),
  );
  async function attempt(choice, button) {
    button.disabled = true;
    failure.textContent = more.textContent = "";
    try {
      await choice.run();
      dialog.close();
      done();
    } catch (why) {
      if (why.name === "AbortError") return dialog.close();
      button.disabled = false;
      failure.textContent = why.message;
      const next = choices.filter((one) => one.after?.includes(why.kind));
      more.textContent = next.map((one) => one.words).join(" ");
      offer([choice, ...next.filter((one) => one !== choice)]);
    }
  }
  dialog.replaceChildren(h("h2", { id: "confirm-title" }, title), h("p", {}, words), failure, more, row);
  offer(choices.filter((choice) => !choice.after));
  dialog.showModal();
}
