// Shows images of a session. They are drawn on a canvas, so the content policy of the page needs no exception for them.

import { at, download } from "./api.js";
import { copier, h } from "./dom.js";

const HEIGHT = 160; // of a thumbnail, in pixels

/** Shows the images of a session, and fetches each once. */
export class Media {
  constructor(session, signal) {
    Object.assign(this, { session, signal, known: new Map() });
  }

  /** A part of a message that is not text: `name` is its modality, `id` the digest of its bytes. */
  part({ name, id }) {
    const title = name || "part of an unknown kind";
    const caption = h("figcaption", {}, title, id ? [" ", h("code", { title: id }, `${id.slice(0, 12)}…`), copier(id, "its SHA-256")] : " (by URL, not fetched)");
    const figure = h("figure", { class: "medium" }, caption);
    if (id && name === "image")
      this.bitmap(id).then(
        (bitmap) => figure.prepend(thumbnail(bitmap, id)),
        (why) => why.name !== "AbortError" && caption.append(why.status === 404 ? " (its bytes are not stored)" : ` (cannot be shown: ${why.message})`),
      );
    return figure;
  }

  bitmap(id) {
    if (!this.known.has(id)) this.known.set(id, download(at(this.session, "media", id), {}, this.signal).then((file) => createImageBitmap(file)));
    return this.known.get(id);
  }
}

function thumbnail(bitmap, id) {
  const scale = Math.min(1, HEIGHT / bitmap.height);
  const [width, height] = [bitmap.width, bitmap.height].map((size) => Math.max(1, Math.round(size * scale)));
  const label = `image ${id.slice(0, 12)}, ${bitmap.width} by ${bitmap.height}`;
  const canvas = h("canvas", { width, height, role: "img", "aria-label": label, title: label });
  canvas.getContext("2d").drawImage(bitmap, 0, 0, width, height);
  return canvas;
}
