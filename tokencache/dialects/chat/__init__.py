"""OpenAI chat completions: the dialect of most clients, and the one that every other dialect is translated into.

A request's members stay raw JSON, and the client gets the engine's own bytes.

`routes`       routes, credential header, error shape
`request`      the request as the client wrote it, and what is known of it
`reply`        what the client gets of a reply
`vocabulary`   messages and sampling parameters
`incremental`  parses only what is new in a body that begins like the session's last one
`rendering`    what else, besides the messages, shapes the prompt

The last two are not in every dialect: only chat requests are rendered, and the other dialects reach the incremental parser as chat
requests.
"""
