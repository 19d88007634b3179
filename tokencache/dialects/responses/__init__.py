"""OpenAI Responses: what Codex and the Agents SDK speak.

A conversation is a list of items (messages, reasoning, calls, their outputs); a reply is a response with such items, streamed
event by event. A response is kept in its session, so that the next request may name it instead of repeating it. Handles
stand in the ids of items and in `encrypted_content`.

`codec`    the routes; `errors`: what went wrong, in OpenAI's words
`request`  a request's members → chat; `items`: its items → chat messages; `tools`: what may be called
`freeform` custom tools, whose input is free text
`reply`    the chat reply as a response, whole or streamed; `output`: its items, `events`: what is told of them
`kept`     what is kept of a response; `stored`: questions about it
"""
