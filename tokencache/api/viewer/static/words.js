// What the words on the page mean (docs/api.md has them all).

export const STARTS = {
  root: "nothing that the model said is in this history: a new line begins",
  continue: "the prompt begins with the exact tokens of the turn before",
  branch: "the same, from a turn that was gone on from already: a retry, a parallel agent, a rollback",
  resplice: "the context was edited; recognised replies stand in it with their exact tokens",
  plain: "the history was not recognised for certain: the engine rendered it anew",
};

export const REASONS = {
  "unrecognised-reply": "the history holds a reply that was not recorded here, or none is known for certain",
  "rewritten-reply": "the reply that came back is changed in a way that nobody vouches for",
  "foreign-reply": "an id of ours stands beside words that are not, or nothing but words says that this is the model's",
  interrupted: "the harness left in mid-stream and holds a part of what was sampled; that part stands in its exact tokens",
  "interrupt-inside-token": "what the harness had heard ends within a token",
  "switched-off": "the request needs a rule that is switched off",
  "ambiguous-reply": "several recorded turns fit, and their tokens differ: give each rollout a session, or send token ids back",
  "client-ids": "the prompt begins with ids that the client sent back; they are not recorded here, and proven to be these messages",
  "client-ids-unproven": "ids that are not recorded here came back, and are not proven to be these messages",
  "context-edited": "messages before or between recognised replies changed",
  "rendered-alike": "messages changed, and the template renders the history as before",
  "past-changes": "the template writes the history otherwise now",
  "new-messages-reach-back": "the template puts new messages before the last reply",
  "tail-not-proven": "what follows the last reply could not be proven without rendering everything anew",
  "opener-unknown": "what recognised replies were sampled behind is not known to be a generation prompt",
  "other-stop": "the model stopped at another id than the template wants there",
  "record-only": "the engine does not take token ids",
  "renderings-differ": "/tokenize renders otherwise than chat completions do",
  "engine-unknown": "the engine could not be probed",
  "context-full": "the spliced prompt would not fit",
  "engine-refused-ids": "the engine refused the spliced prompt; the call was sent as the harness wrote it",
  "engine-disagrees": "the engine used other ids than were sent; recorded as it really was",
  "tail-by-engine": "the engine put the tail behind the exact history, and nobody proved it",
  "prefix-ends-before-last-reply": "the engine takes the beginning of a prompt, and a reply that is not known stands behind it",
  "no-rendering": "the context was edited, and this engine renders nothing",
  "not-for-completions": "the request asks for what text completions cannot do; the engine's chat answered",
  "store-error": "the store failed while the call was planned",
  "torn-record": "what was stored does not fit together",
  "internal-error": "the proxy failed while the call was planned; its log says why",
  media: "images and the like: relayed and recorded, not continued",
};

export const KINDS = {
  prompt: ["prompt", "what the first turn was given, as the template writes it; mask 0"],
  earlier: ["earlier reply", "sampled, and trained, in an earlier sequence; here it is context: mask 0"],
  anchor: ["anchor", "a recognised reply in an edited context, with its exact tokens; mask 0"],
  tail: ["tail", "what the template puts between two replies: end of turn, new messages, generation prompt; mask 0"],
  sampled: ["sampled", "sampled by the policy in this sequence; mask 1"],
  unscored: ["sampled, unscored", "sampled, but without log probabilities; mask 0"],
};

export const VERDICTS = {
  same: "came back as it was served",
  equivalent: "only its writing changed",
  rewritten: "a value changed, in a known way",
  foreign: "no rule makes this of what was served",
  unknown: "no turn is recorded that answers in this place, or said the same in another",
};

/** What a reason means, as far as it is known here. */
export const reasonText = (reason) => REASONS[reason] ?? "see docs/templates.md: no tail could be proven";
