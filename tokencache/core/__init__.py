"""The core: pure functions and values. It decides; the shell around it does the I/O.

==============  =====================================================================================================
`ids`           token ids as bytes
`canonical`     one conversation entry, however it was written; its digest
`chain`         the digest of a conversation up to each of its messages
`verdict`       is the message that came back the one that was served?
`match`         which recorded turn does this history continue?
`splice`        prefix + tail = the prompt that is sent
`turn`          what is kept of one model call
`budget`        how much a session may use
`lineage`       the turns of a session as sequences for a trainer
`invariants`    what must always hold, as checkers
==============  =====================================================================================================

Nothing in here imports asyncio, aiohttp, redis or transformers, nor any other part of tokencache; a test says so.
"""
