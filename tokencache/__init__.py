"""tokencache: exact tokens for agents that only exchange text.

Glossary: the terms that the code, metrics and documents use, each with one meaning. `docs/glossary.md` has more details.

harness         the agent program that calls the model
trainer         the program that fetches recorded rollouts and trains on them
session         one rollout: the scope of all look-ups
call            one request of a harness for a reply of the model
message         one entry of a conversation, in the form that all dialects are translated to
turn            one recorded call: prompt ids, completion ids, log probabilities, and the message that was served
reply           what the model answered in one call
echo            a reply that a harness sends back in its history
history         the messages of a request
chain           the digest of a conversation up to each of its messages
prefix          the exact ids of a history: a turn's prompt ids and completion ids
tail            the ids that the template puts after that history: end of turn, new messages, generation prompt
splice          prefix + tail: the prompt that is sent
generation prompt  the ids with which the template opens a reply of the model
stop id         a token id at which the engine stops generating
sentinel        a random text that stands in for a reply, to locate its end in a rendering
match           which recorded turn a history continues: `root`, `continue`, `branch`, `resplice` or `plain`
anchor          a recognized reply that keeps its exact ids inside a prompt that was rendered again
resplice        a prompt that was rendered again around its anchors, because the context was edited
reason          why a turn does not simply continue the turn before it
verdict         whether an echo is the reply that was served: `same`, `equivalent`, `rewritten` or `foreign`
rule            one named difference that is allowed between a served reply and its echo
adapter         a data file about one harness: how to start it, and which rules it needs
lineage         a line of turns, each extending the one before
main child      of the turns that extend one turn, the one that continues its sequence
sequence        a lineage as a trainer uses it: token ids, loss mask, log probabilities
link            a summary or an answer that returned as text in another call, and the turn that sampled it
prefix forest   sequences as token tries: a shared prefix occurs once, and each sampled token has one owner
mark            a fact about a turn that a trainer must know
incident        an event in a session that a trainer must know about
policy version  the trainer's name for a state of the weights
span            a range of a completion's tokens that one policy version sampled; `mixed` where that is not certain
piece           the part of a reply that one request to an engine sampled, if it was broken off and continued
gap             the ids between two replies in a rendering, without the generation prompt of the second
lag             how many policy versions a token is behind the one announced last
hole            an incident by which something that the model sampled is missing from the record
fork            a session that goes on after a turn of another one, whose tokens it shares
finished        declared over by its owner (of a session): it accepts no new calls
sealed          finished and fixed (of a session): what is recorded does not change any more
outcome         how a rollout ended: `ok`, or a kind of failure
valid           complete, and with the outcome `ok` (of a rollout): its reward says something about the policy
settings        what holds for all calls of a session: harness, model aliases, sampling, budget, tenant, history
labels          what a trainer stores with a session: group, metadata, tags
group           the rollouts of one prompt
delivery        finished sessions that a consumer took from the queue, until it acknowledges them
epoch           the time from the creation of a session to its deletion
drift           where the spliced prompt differs from a plain rendering of the same messages
dialect         a wire format of model calls: chat and text completions, Anthropic messages, Responses, Gemini
engine          the server that samples tokens, usually vLLM
driver          the code that probes, prompts and reads one kind of engine
store           where sessions are recorded: the memory of one process, a file, or Redis
ledger          the part of the proxy that starts, ends and records calls in the store
replica         one of several proxies that share a store

Packages, in the order of imports: each imports only packages below it.

`cli`, `commands`, `demo`   the command line
`testing`                   a simulated engine
`server`, `config`          the application on a port, and its settings
`api`                       the trainer's HTTP API, and the viewer
`proxy`                     a call, from the request to the recorded turn
`engine`                    what engines can do, prompts for them, and their replies
`client`                    the trainer's Python client
`adapters`, `batching`, `scoring`   start harnesses; make batches of trajectories; recompute log probabilities
`trajectories`              from recorded turns to training data
`dialects`, `store`         the wire formats of harnesses; where sessions are recorded
`core`                      the rules of exactness: pure, without I/O
`session_url`, `background`, `request_memory`   parts that several packages use
`errors`, `metrics`, `logs`, `net`, `backoff`, `wakeup`, `recent`, `pauses`   parts that all packages use

Outside of this order: `integrations` run in trainers and agent frameworks. The plugin for vLLM is a distribution of its own
(`tokencache_vllm`).
"""


def __getattr__(name: str) -> str:
    """Look the version up when it is needed: importing `importlib.metadata` takes as long as importing a quarter of the client."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import metadata  # noqa: PLC0415 - see above

    try:
        return metadata.version(__name__)
    except metadata.PackageNotFoundError:  # imported from a source tree that is not installed
        return "unknown"
