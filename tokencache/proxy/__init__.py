"""Serves the requests of sessions: plans exact prompts, sends them to an engine, returns the replies, and records the turns.

In the order of a call:

`sessions`           finds the session that a request belongs to
`harness_profile`    the rules that apply to each harness, and its model names
`request_body`       reads a request's body within its limits
`compressed_body`    decompresses it
`endpoints`          the routes within a session: model calls, token counts, lists of models
`dedup`              deduplicates retries, so that each call is made once
`call`               one model call as a state machine
`planner`            plans the exact prompt: prefix and tail, or the engine's own rendering with the reason
`earlier_thoughts`   sends calls otherwise whose exact prompt has a thought that misleads the engine
`prefix_cache`       the ids of recent turns in memory
`client_ids`         token ids that clients send back
`partial_reply`      how much of an aborted reply the client received
`engine_retry`       tries other engines, or waits for one
`response`           sends the reply to the client
`generated_replies`  writes replies without an engine: for a used-up budget, and for a prompt that is too long
`recorder`           makes turns from a reply
`routed_experts`     writes routed experts to files
`ledger`             begins and ends calls in the store, even when the store fails
`passthrough`        forwards every other request byte for byte

A request without a session goes to `passthrough`, unchanged.
"""
