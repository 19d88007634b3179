// Sends requests to the API. The user enters the admin key once; this tab keeps it.

const ROOT = new URL("../v1/", document.baseURI);
const STORED = "tokencache.key";

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

let asking = null;

/** Get JSON. Prompts the user for the key if it is needed. Throws `ApiError`, or `AbortError` if the signal aborts. */
export async function get(path, query = {}, signal = undefined) {
  const url = new URL(path, ROOT);
  for (const [name, value] of Object.entries(query)) url.searchParams.set(name, value);
  for (;;) {
    const key = sessionStorage.getItem(STORED);
    let answer;
    try {
      answer = await fetch(url, { signal, headers: key ? { Authorization: `Bearer ${key}` } : {}, cache: "no-store" });
    } catch (why) {
      if (why.name === "AbortError") throw why;
      throw new ApiError(0, "the proxy does not answer");
    }
    if (answer.status === 401) {
      if (key === sessionStorage.getItem(STORED)) await (asking ??= ask(Boolean(key)).finally(() => (asking = null)));
      continue;
    }
    const body = await answer.json().catch(() => null);
    if (!answer.ok || body === null) throw new ApiError(answer.status, body?.error?.message ?? `the proxy answered ${answer.status}`);
    return body;
  }
}

/** The path of a route of a session. */
export const at = (session, ...rest) => ["sessions", session, ...rest].map(encodeURIComponent).join("/");

function ask(refused) {
  const dialog = document.getElementById("ask");
  const form = document.getElementById("ask-form");
  const field = document.getElementById("ask-key");
  document.getElementById("ask-error").textContent = refused ? "Wrong key." : "";
  sessionStorage.removeItem(STORED);
  field.value = "";
  if (!dialog.open) dialog.showModal();
  return new Promise((done) => {
    dialog.addEventListener("cancel", (event) => event.preventDefault());
    form.addEventListener(
      "submit",
      (event) => {
        event.preventDefault();
        sessionStorage.setItem(STORED, field.value);
        field.value = "";
        dialog.close();
        done();
      },
      { once: true },
    );
  });
}
