// Shows a long sequence as blocks of tokens. Only blocks near the visible part are filled. The others are empty boxes with their last or
// expected height, so that the page scrolls like any text and contains only a few thousand nodes.

import { h } from "./dom.js";

export const BLOCK = 512;
const NEAR = "900px";
const HELD = 48; // blocks whose tokens stay cached

export class Blocks {
  /** `fetch(start, end)` fetches the tokens of a block, `draw(tokens)` makes nodes from them, `drawn()` is called afterwards. */
  constructor(total, { fetch, draw, drawn }) {
    Object.assign(this, { total, fetch, draw, drawn, known: new Map() });
    this.element = h("div", { class: "blocks" });
    this.blocks = [];
    for (let start = 0; start < total; start += BLOCK) {
      const block = h("div", { class: "block away", data: { start } });
      this.blocks.push(block);
    }
    this.element.append(...this.blocks);
    this.observer = new IntersectionObserver((entries) => entries.forEach((entry) => this.seen(entry)), { rootMargin: `${NEAR} 0px` });
  }

  /** Start. Call this after the element was added to the page. */
  start() {
    const wide = Math.max((this.element.clientWidth - 150) / 7.3, 20);
    this.guess = Math.ceil((BLOCK * 5.2) / wide) * 21;
    for (const block of this.blocks) block.style.height = `${this.guess}px`;
    for (const block of this.blocks) this.observer.observe(block);
  }

  stop() {
    this.observer.disconnect();
  }

  seen({ target, isIntersecting }) {
    target.wanted = isIntersecting;
    if (isIntersecting) this.fill(target).catch(() => {}); // the block shows the error
    else if (!target.classList.contains("away")) this.empty(target);
  }

  empty(block) {
    block.style.height = `${block.offsetHeight}px`;
    block.replaceChildren();
    block.classList.add("away");
  }

  async fill(block) {
    if (!block.classList.contains("away") || block.filling) return block.filling;
    const start = Number(block.dataset.start);
    block.filling = this.tokens(start)
      .then((tokens) => {
        if (block.wanted === false) return;
        block.replaceChildren(...this.draw(tokens));
        block.classList.remove("away");
        block.style.height = "";
        this.drawn();
      })
      .catch((why) => {
        if (why.name === "AbortError") return;
        const again = h("button", { type: "button", onclick: () => this.fill(block) }, "try again");
        block.replaceChildren(h("p", { class: "note" }, `${why.message} `, again));
        throw why;
      })
      .finally(() => (block.filling = null));
    return block.filling;
  }

  async tokens(start) {
    let known = this.known.get(start);
    this.known.delete(start);
    known ??= await this.fetch(start, Math.min(start + BLOCK, this.total));
    this.known.set(start, known);
    if (this.known.size > HELD) this.known.delete(this.known.keys().next().value);
    return known;
  }

  /** Draw the filled blocks again after a change of style or sites. */
  redraw() {
    for (const block of this.blocks) {
      const known = this.known.get(Number(block.dataset.start));
      if (known && !block.classList.contains("away")) block.replaceChildren(...this.draw(known));
    }
    this.drawn();
  }

  /** Scroll a token into view and return its node. */
  async reveal(token) {
    const block = this.blocks[Math.floor(token / BLOCK)];
    if (!block) return null;
    block.wanted = true;
    if (block.classList.contains("away")) {
      block.scrollIntoView({ block: "start" });
      await this.fill(block);
    }
    for (let at = token; at >= Number(block.dataset.start); at -= 1) {
      const node = block.querySelector(`[data-i="${at}"]`);
      if (node) return node;
    }
    return null;
  }

  /** The tokens at the upper and the lower edge of the view, roughly. */
  view(top, bottom) {
    const edge = (y) => {
      const i = this.blocks.findIndex((block) => block.getBoundingClientRect().bottom > y);
      if (i < 0) return this.total;
      const box = this.blocks[i].getBoundingClientRect();
      const part = Math.min(Math.max((y - box.top) / Math.max(box.height, 1), 0), 1);
      return Math.min(Math.round((i + part) * BLOCK), this.total);
    };
    return [edge(top), edge(bottom)];
  }
}
