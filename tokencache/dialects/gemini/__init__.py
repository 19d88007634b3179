"""Gemini: what Gemini CLI and everything else that uses google-genai speaks.

A conversation is a list of contents with parts (text, functionCall, functionResponse); a reply is a GenerateContentResponse, or
a stream of them. The model's name stands in the path. The handle is a `thoughtSignature`.

`codec`     the routes, models
`contents`  contents → chat messages; `settings`: tools and generation settings → chat, `schema`: their schemas
`reply`     the chat reply as responses, whole or streamed
`entry`     an object of a request, in either spelling; `words`: ends, usage, errors
"""
