"""OpenAI Responses: the dialect of Codex and the Agents SDK.

A conversation is a list of items (messages, reasoning, calls, their outputs). A reply is a response with such items, streamed event by
event. Responses are stored in their session, so that the next request may name one instead of repeating it. Handles are in the ids of
items and in `encrypted_content`.

`routes`      routes, credential header, and the parsing of a whole request
`request`     a request's members and items → chat
`reply`       a chat reply → a response, whole or streamed
`vocabulary`  errors, tools, ids of items
`stored`      stored responses; in no other dialect can a request refer to an earlier response
"""
