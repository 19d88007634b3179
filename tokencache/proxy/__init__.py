"""Serves the requests of sessions: plans exact prompts, sends them to an engine, returns the replies, and records the turns.

In the order of a call:

`sessions`           finds the session that a request belongs to
`harness_profile`    knows the harnesses: which rules apply to each, and which model names it uses
`request_body`       reads a request's body within its limits
`endpoints`          the routes within a session: model calls, token counts, lists of models
`dedup`              makes a call once although its client retries it
`call`               one model call as a state machine
`planner`            plans the exact prompt: prefix and tail, or the engine's own rendering and why
`prefix_cache`       the ids of recent turns in memory
`client_ids`         token ids that clients send back
`partial_reply`      how much of an aborted reply the client received
`engine_retry`       tries other engines, or waits for one
`response`           sends the reply to the client
`generated_replies`  replies without an engine: for a used-up budget, and for a prompt that is too long
`recorder`           makes turns from a reply
`routed_experts`     writes routed experts to files
`ledger`             begins and ends calls in the store, also when the store fails
`passthrough`        passes on every other request byte for byte

A request without a session goes to `passthrough`, unchanged.
"""
