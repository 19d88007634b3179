// Draws the whole sequence as one bar: its runs in their colors, the places where a plain rendering differs, and the visible part.

import { s } from "./dom.js";
import { count } from "./format.js";

const WIDTH = 1000;
const HEIGHT = 24;

export class Minimap {
  /** `jump(token)` is called when the user clicks. */
  constructor(total, runs, jump) {
    this.total = total;
    const scale = (token) => (WIDTH * token) / Math.max(total, 1);
    const bars = runs.map((run) => s("rect", { x: scale(run.start), y: 5, width: Math.max(scale(run.end) - scale(run.start), 0.4), height: HEIGHT - 10, class: `k-${run.kind}` }));
    this.ticks = s("g", { class: "ticks" });
    this.view = s("rect", { class: "view", y: 0.75, height: HEIGHT - 1.5, x: 0, width: 4, rx: 2 });
    this.element = s("svg", {
      class: "minimap", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", tabindex: 0, role: "slider",
      "aria-label": "Position in the sequence", "aria-valuemin": 0, "aria-valuemax": Math.max(total - 1, 0), "aria-valuenow": 0,
    }, bars, this.ticks, this.view);
    const to = (event) => {
      const box = this.element.getBoundingClientRect();
      jump(Math.max(0, Math.min(total - 1, Math.floor((total * (event.clientX - box.left)) / box.width))));
    };
    this.element.addEventListener("pointerdown", (event) => (this.element.setPointerCapture(event.pointerId), to(event)));
    this.element.addEventListener("pointermove", (event) => event.buttons && to(event));
    this.element.addEventListener("keydown", (event) => {
      const step = { PageUp: -0.1, PageDown: 0.1, ArrowLeft: -0.01, ArrowRight: 0.01 }[event.key];
      if (step === undefined) return;
      event.preventDefault();
      event.stopPropagation();
      jump(Math.max(0, Math.min(total - 1, Math.round(this.first + step * total))));
    });
    this.first = 0;
  }

  /** Mark where a plain rendering differs: an array of tokens. */
  mark(places) {
    this.ticks.replaceChildren(...places.map((token) => s("rect", { x: (WIDTH * token) / this.total - 0.75, y: 0, width: 1.5, height: 5 })));
  }

  /** Set the visible part. */
  look(first, last) {
    this.first = first;
    this.view.setAttribute("x", (WIDTH * first) / this.total);
    this.view.setAttribute("width", Math.max((WIDTH * (last - first)) / this.total, 4));
    this.element.setAttribute("aria-valuenow", first);
    this.element.setAttribute("aria-valuetext", `tokens ${count(first)} to ${count(last)} of ${count(this.total)}`);
  }
}
