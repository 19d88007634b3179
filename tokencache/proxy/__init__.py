"""The proxy: the aiohttp shell around the core.

==============  =====================================================================================================
`app`           routes, start and stop
`sessions`      which rollout does a request belong to?
`relay`         everything outside a session, byte for byte
`caller`        what can be asked within a session, and the plan for it
`exchange`      how one call is sent, and how its reply is said
`call`          one model call, from its plan to its last byte
`delivery`      what the harness hears of a reply, and when
`hold`          a call that no engine takes waits, or goes elsewhere
`plan`          what exactly is sent: prefix + tail, or the engine's own rendering and why
`prefixes`      recent prefixes at hand
`record`        from a reply to the turns that are stored
`experts`       files of routed experts, beside the store
`echoes`        token ids that came back with a history, held against the record
`latecomers`    calls that come after the session was sealed
`ledger`        the store as calls see it: what is done when it fails
`sse`           event streams
==============  =====================================================================================================
"""
