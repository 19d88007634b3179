// Explanations of the terms on the page. The proxy generates those of reasons and incidents from its tables (meanings.js).

import { INCIDENTS, REASONS } from "./meanings.js";

export const STARTS = {
  root: "the history holds no reply of the model: a new sequence begins",
  continue: "the prompt begins with the exact tokens of the turn before",
  branch: "the same, from a turn that already has a continuation: a retry, a parallel agent, a rollback",
  resplice: "the context was edited; recognized replies keep their exact tokens",
  plain: "the history was not recognized with certainty: the engine rendered it",
};

export const KINDS = {
  prompt: ["prompt", "the prompt of the first turn, as the template renders it; mask 0"],
  earlier: ["earlier reply", "sampled and trained in an earlier sequence; here it is context: mask 0"],
  anchor: ["anchor", "a recognized reply in an edited context, with its exact tokens; mask 0"],
  tail: ["tail", "the tokens between two replies: end of turn, new messages, generation prompt; mask 0"],
  sampled: ["sampled", "sampled by the policy in this sequence; mask 1"],
  unscored: ["sampled, unscored", "sampled without log probabilities, or forced by a thinking budget; mask 0"],
};

export const VERDICTS = {
  same: "came back as it was served",
  equivalent: "only its form changed",
  rewritten: "a value changed, in a way that a rule knows",
  foreign: "no rule explains the difference from what was served",
  unknown: "no recorded turn answered here or has the same reply elsewhere",
};

export const LINKS = {
  compaction: "a summary, with which the new context begins",
  delegation: "that of a sub-agent",
};

/** The meaning of a reason; empty if a newer proxy recorded it. */
export const reasonText = (reason) => REASONS[reason] ?? "";

/** The meaning of an incident kind, and what to do. */
export const incidentText = (kind) => INCIDENTS[kind] ?? "";

/** What each color of the page means. */
export const COLORS = {
  chosen: "what can be clicked, and what is chosen",
  context: "context: what the harness sent, and all that is as usual",
  trained: "sampled by the policy here, and trained; in a run: valid rollouts, filled if they passed",
  branch: "branch: a second continuation of a turn, and the replies that it shares with the first",
  resplice: "resplice: an edited context, and the replies that keep their exact tokens in it",
  differs: "differs from what was served, from a plain rendering, or from the other sessions of the group",
  notice: "not as usual, but nothing is missing: plain, incidents, marks, sampled without log probabilities; with heat, improbable tokens",
  missing: "data is missing, or would be lost; failed rollouts",
};
