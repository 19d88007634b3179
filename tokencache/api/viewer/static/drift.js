// Drift: where a plain rendering of a turn's messages differs from the prompt that was sent, as the proxy measured it. Of each
// sequence its last prompt is compared, which holds all others: one rendering each, as the figures of a trajectory have it.

import { at, get } from "./api.js";

/** What was measured of a session: `turns` (id → {rendered, tokens, sites}), `unmeasured` (id → why); `why` if nothing was. */
export async function driftOf(session, signal) {
  try {
    const told = await get(at(session, "drift"), { drift: "sequences" }, signal);
    const turns = new Map(Object.entries(told.turns));
    const unmeasured = new Map(Object.entries(told.unmeasured ?? {}));
    return { turns, unmeasured, why: turns.size ? "" : (unmeasured.values().next().value ?? "not measured") };
  } catch (error) {
    if (error.name === "AbortError") throw error;
    return { turns: new Map(), unmeasured: new Map(), why: `not measured: ${error.message}` };
  }
}

/** The sums over the prompts that were spliced; what the engine rendered itself is its own plain rendering. */
export function driftSums({ turns }, match) {
  const spliced = [...turns].filter(([id]) => !["root", "plain"].includes(match(id))).map(([, one]) => one);
  return { prompts: spliced.length, drifted: spliced.filter((one) => one.sites.length).length, tokens: spliced.reduce((sum, one) => sum + one.tokens, 0) };
}
