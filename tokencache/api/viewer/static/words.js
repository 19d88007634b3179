// What the words on the page mean (docs/api.md has them all).

export const STARTS = {
  root: "nothing that the model said is in this history: a new line begins",
  continue: "the prompt begins with the exact tokens of the turn before",
  branch: "the same, from a turn that was gone on from already: a retry, a parallel agent, a rollback",
  resplice: "the context was edited; recognised replies stand in it with their exact tokens",
  plain: "the history was not recognised for certain: the engine rendered it anew",
};

// Written by `python -m tests.docs.reference` from tokencache/core/reasons.py.
// <!-- generated: viewer-reasons -->
export const REASONS = {
  "unrecognised-reply": "the history contains a reply that was not recorded here, or none of its replies is certain",
  "rewritten-reply": "the reply came back changed in a way that no rule of this harness allows, with other reasoning, or with an id that was issued to another reply",
  "foreign-reply": "the reply has an id or a handle that the proxy issued, but other text; or its context changed and only its text matches a recorded reply",
  "ambiguous-reply": "several recorded turns match, and their tokens differ. If several rollouts share a session, give each its own session, or let the agent send its token ids back",
  "interrupted": "the harness disconnected during a stream and sent back a part of what was sampled; that part keeps its exact ids",
  "interrupt-inside-token": "the text that the harness received ends inside a token; it is rendered as text",
  "context-edited": "(resplice) messages before or between recognized replies changed",
  "rendered-alike": "(continue, branch) messages changed, but the template renders the history as before: the prompt continues the exact ids",
  "past-changes": "(resplice) the template now renders the history differently, so it was rendered again",
  "new-messages-reach-back": "the template puts new messages before the last reply",
  "other-stop": "(resplice) the model stopped at another stop id than the template writes there",
  "opener-unknown": "some or all recognized replies cannot be placed, because the prompt that they were sampled after does not end with a known generation prompt; they are rendered as text",
  "unplaced-replies": "an older version recorded the turn, and its record does not say where the replies in its prompt are",
  "client-ids": "(resplice) the prompt begins with ids that the client sent back on its messages. They are not recorded here and were proven to be these messages. Only replies recorded from here on are trained; earlier ones are context",
  "client-ids-unproven": "ids that are not recorded here came back, and could not be proven to be these messages",
  "record-only": "the engine does not accept token ids",
  "renderings-differ": "/tokenize renders differently from chat completions",
  "engine-unknown": "the engine could not be probed",
  "context-full": "the spliced prompt would not fit into the engine's context; the template's own rendering may",
  "engine-refused-ids": "the engine answered 400 to the spliced prompt; nothing was sampled, and the call was sent as the harness wrote it",
  "engine-disagrees": "the engine used other ids than were sent; the turn is recorded as it really was",
  "tail-by-engine": "(continue) the engine put the tail after the exact history, and nothing proved it",
  "prefix-ends-before-last-reply": "the engine accepts only the beginning of a prompt, and an unrecognized reply comes after it",
  "no-rendering": "the context was edited, and this engine offers no rendering",
  "no-logprobs": "the engine needs the log probabilities of the last reply with its ids, and they are not recorded",
  "not-for-completions": "the completions driver cannot express what the request asks for; the engine's own chat answered",
  "switched-off": "the request needs a rule that is switched off",
  "media": "the request contains images or other media: it is recorded, and not continued",
  "continue-final-message": "the request asks the engine to continue the last message",
  "no-generation-prompt": "the request asks for a prompt without a generation prompt",
  "echo": "the request asks for the prompt's last message in the reply",
  "truncated-prompt": "the request asks the engine to truncate the prompt",
  "no-messages": "the request has no messages",
  "unreadable-history": "the messages are not those of a chat completion request",
  "text-completion": "the request is a text completion, which has no messages",
  "store-error": "the store failed while the call was planned",
  "torn-record": "the stored records do not fit together",
  "internal-error": "tokencache failed while the call was planned; its log has the traceback",
  "tail-not-proven": "the tail depends on the text of the reply, or a trusted shape failed its check",
  "template-refuses": "the template raises an error for these messages, as it does for a direct call",
  "render-error": "the engine could not render the conversation",
  "stop-ids-unknown": "the probe found no stop ids, so the end of a reply cannot be located",
  "empty-tail": "the template renders nothing after the reply",
  "no-stop-id-behind-the-reply": "no stop id follows the reply in the rendering",
  "reply-not-rendered": "the template does not render the reply",
  "sentinel-lost": "the template does not render the sentinel that stands for the reply",
  "sentinel-twice": "the template renders the sentinel that stands for the reply more than once",
  "sentinel-in-messages": "the messages contain the random sentinel"
};
// <!-- end -->

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
export const reasonText = (reason) => REASONS[reason] ?? "unknown to this version";
