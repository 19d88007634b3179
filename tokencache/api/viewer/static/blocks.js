// Shows a long list of items (tokens, messages) as blocks. Only blocks near the visible part are filled. The others are empty boxes with
// their last or expected height, so that the page scrolls like any text and contains only a few thousand nodes.

import { h } from "./dom.js";

const NEAR = "900px";
const HELD = 48; // blocks whose items stay cached

export class Blocks {
  /**
   * Blocks of `size` items each. `fetch(start, end)` fetches the items of a block, `draw(items)` makes nodes from them (the node of an item
   * has `data-i`), `drawn()` is called afterwards, `height(width)` guesses the height of a block, and `scroll(node, where)` scrolls to a node.
   */
  constructor(total, { size, fetch, draw, drawn, height, scroll = (node, block) => node.scrollIntoView({ block }) }) {
    Object.assign(this, { total, size, fetch, draw, drawn, height, scroll, known: new Map() });
    this.element = h("div", { class: "blocks" });
    this.blocks = [];
    for (let start = 0; start < total; start += size) this.blocks.push(h("div", { class: "block away", data: { start } }));
    this.element.append(...this.blocks);
    const margin = `${NEAR} 0px`;
    this.observer = new IntersectionObserver((entries) => entries.forEach((entry) => this.seen(entry)), { rootMargin: margin, scrollMargin: margin });
  }

  /** Start. Call this after the element was added to the page. */
  start() {
    const guess = this.height(this.element.clientWidth);
    for (const [n, block] of this.blocks.entries()) block.style.height = `${(guess * Math.min(this.size, this.total - n * this.size)) / this.size}px`;
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
    block.filling = this.items(start)
      .then((items) => {
        if (block.wanted === false) return;
        block.replaceChildren(...this.draw(items));
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

  async items(start) {
    let known = this.known.get(start);
    this.known.delete(start);
    known ??= await this.fetch(start, Math.min(start + this.size, this.total));
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

  /** Scroll to the block of an item, fill it, and return the item's node. */
  async reveal(item) {
    const block = this.blocks[Math.floor(item / this.size)];
    if (!block) return null;
    block.wanted = true;
    if (block.classList.contains("away")) {
      this.scroll(block, "start");
      await this.fill(block);
    }
    for (let at = item; at >= Number(block.dataset.start); at -= 1) {
      const node = block.querySelector(`[data-i="${at}"]`);
      if (node) return node;
    }
    return null;
  }

  /** The items at the upper and the lower edge of the view, roughly. */
  view(top, bottom) {
    const edge = (y) => {
      const i = this.blocks.findIndex((block) => block.getBoundingClientRect().bottom > y);
      if (i < 0) return this.total;
      const box = this.blocks[i].getBoundingClientRect();
      const part = Math.min(Math.max((y - box.top) / Math.max(box.height, 1), 0), 1);
      return Math.min(Math.round((i + part) * this.size), this.total);
    };
    return [edge(top), edge(bottom)];
  }
}
