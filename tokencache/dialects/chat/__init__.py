"""OpenAI chat completions: the dialect of most clients, into which every other dialect is translated.

A request's members stay raw JSON, except for numbers in odd spellings, and the client gets the engine's own bytes.

`routes`       routes, credential header, error shape
`request`      parses a request, and keeps its members as the client wrote them
`reply`        removes what the client did not ask for from a reply
`vocabulary`   messages and sampling parameters
`scalars`      numbers and truth values as the engine will read them
`sampling`     decides which members of a request bend or replace the policy's choice
`grammar`      finds whether a grammar binds the reply
`whole`        requests whole replies, and writes them with all of vLLM's members
`incremental`  parses only the new part of a body that begins like the session's last one
`rendering`    what shapes the prompt besides the messages

Other dialects have no `sampling`, `incremental` and `rendering`, because their requests pass through these three as chat requests.
"""
