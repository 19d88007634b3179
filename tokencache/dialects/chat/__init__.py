"""OpenAI chat completions: the format of most clients, into which every other dialect is translated. Its dialect is in `untranslated`.

A request's members stay raw JSON, except for numbers in odd spellings, and the client gets the engine's own bytes.

`routes`       the engine's routes
`request`      parses a request, and keeps its members as the client wrote them
`reply`        removes what the client did not ask for from a reply
`vocabulary`   messages and sampling parameters
`scalars`      numbers and truth values as the engine will read them
`sampling`     finds what bends or replaces the policy's choice in a request
`grammar`      finds whether a grammar binds the reply
`whole`        requests whole replies, and writes them with all of vLLM's members
`incremental`  parses only the new part of a body that begins like the session's last one
`rendering`    what shapes the prompt besides the messages

Other dialects have no `sampling`, `incremental` and `rendering`, because their requests pass through these three as chat requests.
"""
