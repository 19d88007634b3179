// Sends requests to the API. The user enters the admin key once; this tab keeps it.

const ROOT = new URL("../v1/", document.baseURI);
const STORED = "tokencache.key";

export class ApiError extends Error {
  constructor(status, message, kind = "") {
    super(message);
    Object.assign(this, { status, kind });
  }
}

let asking = null;

/** Get JSON. Throws `ApiError`, or `AbortError` if the signal aborts. */
export const get = (path, query = {}, signal = undefined) => send("GET", path, query, signal);

/** Send a request without a body and return the JSON of the answer. Throws like `get`. */
export async function send(method, path, query, signal) {
  const answer = await request(method, path, query, signal);
  const body = await answer.json().catch(() => null);
  if (body === null) throw new ApiError(answer.status, "the answer of the proxy is not JSON");
  return body;
}

/** Get a file. Throws like `get`. */
export const download = async (path, query, signal) => (await request("GET", path, query, signal)).blob();

/** Send a request. Prompts the user for the key if it is needed. */
async function request(method, path, query, signal) {
  const url = new URL(path, ROOT);
  for (const [name, value] of Object.entries(query)) url.searchParams.set(name, value);
  for (;;) {
    const key = sessionStorage.getItem(STORED);
    let answer;
    try {
      answer = await fetch(url, { method, signal, headers: key ? { Authorization: `Bearer ${key}` } : {}, cache: "no-store" });
    } catch (why) {
      if (why.name === "AbortError") throw why;
      throw new ApiError(0, "the proxy does not answer");
    }
    if (answer.status === 401) {
      if (key === sessionStorage.getItem(STORED)) await (asking ??= ask(Boolean(key)).finally(() => (asking = null)));
      continue;
    }
    if (answer.ok) return answer;
    const { error } = await answer.json().catch(() => ({}));
    throw new ApiError(answer.status, error?.message ?? `the proxy answered ${answer.status}`, error?.type);
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
