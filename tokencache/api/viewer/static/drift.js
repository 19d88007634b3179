// Fetches the measured drift: where a plain rendering of the messages differs from the prompt that was sent. Only the last prompt of each
// sequence is compared, because it contains all earlier ones.

import { at, get } from "./api.js";

/** The drift of a session: `turns` (id → {rendered, tokens, sites}), `unmeasured` (id → reason); `why` if nothing was measured. */
export async function driftOf(session, signal) {
  try {
    const found = await get(at(session, "drift"), { drift: "sequences" }, signal);
    const turns = new Map(Object.entries(found.turns));
    const unmeasured = new Map(Object.entries(found.unmeasured ?? {}));
    return { turns, unmeasured, why: turns.size ? "" : (unmeasured.values().next().value ?? "not measured") };
  } catch (error) {
    if (error.name === "AbortError") throw error;
    return { turns: new Map(), unmeasured: new Map(), why: `not measured: ${error.message}` };
  }
}

/** The sums over spliced prompts. A prompt that the engine rendered cannot drift: it is its own plain rendering. */
export function driftSums({ turns }, match) {
  const spliced = [...turns].filter(([id]) => !["root", "plain"].includes(match(id))).map(([, one]) => one);
  return { prompts: spliced.length, drifted: spliced.filter((one) => one.sites.length).length, tokens: spliced.reduce((sum, one) => sum + one.tokens, 0) };
}
