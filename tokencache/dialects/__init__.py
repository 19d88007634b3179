"""Dialects: one package for each wire format that clients use. Start with `base`, which defines what a dialect provides.

`chat/`             OpenAI chat completions. Every other dialect is translated into it
`anthropic/`        Anthropic Messages
`responses/`        OpenAI Responses
`gemini/`           Google's generateContent
`text_completions`  text completions: recorded, never translated
`untranslated`      the dialects of both: their clients get the engine's own bytes
`probes`            requests that clients send before they call a model

Each package has the same four modules: `routes` (routes, credentials, models), `request` (→ chat), `reply` (chat →) and `vocabulary`.

`registry`           lists the dialects; finds the dialect and the API keys of a request
`reply_encoder`      defines what writes a reply in the client's format
`members`            one table of all members of requests: what the proxy decides by their names
`completion_reader`  parses chat completions and their chunks
`stream_usage`       requests the usage of every stream, and hides it from clients that did not request it
`json_io`            reads clients' JSON
`sse`                server-sent events
`thinking`           splits inline thinking from a reply's text
`gym`, `gym_request` NeMo Gym: token ids on messages, and requests as Gym's model server sends them
"""
