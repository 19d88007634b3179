"""The proxy: the aiohttp shell around the core.

==============  =====================================================================================================
`app`           routes, start and stop
`intake`        a request's body, as far as it is taken in
`sessions`      which rollout does a request belong to?
`relay`         everything outside a session, byte for byte
`caller`        what can be asked within a session
`prompts`       the prompt that a call will have, or would have
`exchange`      how one call is sent, and how its reply is said
`imprint`       is this call a repetition?
`repeats`       a call that is made twice is one call; one that was left may go on
`twins`         calls in flight that ask for the same
`again`         a recorded reply, said once more
`call`          one model call, from its plan to its last byte
`sending`       one call on its way to an engine
`answering`     from the head of an engine's answer to the last byte
`ending`        what a call came to, written to the store once
`delivery`      what the harness hears of a reply, and when
`hold`          a call that no engine takes waits, or goes elsewhere
`plan`          what exactly is sent: prefix + tail, or the engine's own rendering and why
`prefixes`      recent prefixes at hand
`record`        from a reply to the turns that are stored
`habits`        whose habits are forgiven, and what a harness calls the model
`interrupts`    a reply that its harness left, and of which it sends back what it had heard
`experts`       files of routed experts, beside the store
`client_ids`    token ids that came back with a history, as evidence and, where they are proven, as a prompt
`echoes`        token ids that came back with a history, held against the record
`budget`        the end of an episode whose budget is used up
`latecomers`    calls that come after the session was sealed
`ledger`        the store as calls see it: what is done when it fails
==============  =====================================================================================================
"""
