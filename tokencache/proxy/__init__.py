"""Serves the requests of sessions: plans exact prompts, sends them to an engine, returns the replies, and records the turns.

In the order of a call:

`sessions`           finds the session that a request belongs to
`harness_profile`    the rules that apply to each harness, and its model names
`request_body`       reads a request's body within its limits
`compressed_body`    decompresses it
`fetched_media`      fetches the images that a request names by URL
`media_record`       stores the bytes of a request's media
`endpoints`          the routes within a session: model calls, token counts, lists of models
`dedup`              deduplicates retries, so that each call is made once
`call`               one model call as a state machine
`call_states`        its states, a table for each party: the record, the engine, the client, what it was shown
`plan`               how a call is sent, and what planning one call needs
`planner`            plans the exact prompt: prefix and tail, or the engine's own rendering with the reason
`resplice`           plans the prompt of a history that was edited: rendered again, with the exact ids of each reply
`edited_context`     finds the prompt that a recorded turn would have had after edited messages
`earlier_thoughts`   sends calls otherwise whose exact prompt has a thought that misleads the engine
`prefix_cache`       the ids of recent turns in memory
`client_ids`         token ids that clients send back
`kv_salt`            keeps the engine's prefix cache apart by policy version
`sampled_text`       the text that a reply's ids have after the text that was served
`partial_reply`      how much of an aborted reply the client received
`dispatch`           plans the call for an engine and posts it; tries other engines, or waits for one
`engine_sender`      writes the requests of a call and posts them
`continuation`       continues a reply that an engine broke off
`reply_source`       reads the engine's reply to its end: a body, a stream, a continued stream
`gathered_reply`     makes a whole reply of a stream
`delivery`           what the client receives of the reply, and when
`response`           writes the HTTP response
`generated_replies`  writes replies without an engine: for a used-up budget, and for a prompt that is too long
`facts`              what is known of a call: from its beginning on, as it is planned, and at its end
`recorder`           makes turns from these facts
`spans`              writes an OpenTelemetry span for each call
`policy_version`     finds out which policy version sampled each token
`routed_experts`     writes routed experts to files
`ledger`             begins and ends calls in the store, even when the store fails
`known_epochs`       finds out that the store has lost a session between two calls
`finishing`          finishes sessions: at their owner's request, or because their time is up
`passthrough`        forwards every other request byte for byte

A request without a session goes to `passthrough`, unchanged.
"""
