"""Serves model calls: finds the session, plans the exact prompt, sends it to an engine, records the turn, and answers the client.

A call passes these modules in this order:

===================  ==============================================================================================
`sessions`           finds the session that a request belongs to
`endpoints`          serves the requests of sessions, by route
`request_body`       reads a request's body, within limits
`harness_profile`    knows which rules apply to a harness, and its names for models
`dedup/`             makes each call once, although clients retry
`call`               runs one call, as a state machine with one table of transitions
`planner`            makes the exact prompt, or says why the engine must render
`client_ids`         checks token ids that a client sends back
`partial_reply`      finds how much of an interrupted reply its client had received
`prefix_cache`       keeps recent prefixes in memory
`engine_retry`       lets a call wait while no engine takes it
`response`           sends the reply to the client
`generated_replies`  writes the replies that no engine made
`recorder`           makes turns of a reply
`routed_experts`     keeps routed experts in files
`ledger`             writes to the store, and keeps what could not be written
`passthrough`        passes all other requests on, byte for byte
===================  ==============================================================================================
"""
