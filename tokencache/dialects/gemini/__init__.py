"""Gemini: the dialect of Gemini CLI and of every client of google-genai.

A conversation is a list of contents with parts (text, functionCall, functionResponse). A reply is a GenerateContentResponse, or a stream of
such responses. The model's name is in the path. The handle is in `thoughtSignature`.

`routes`      routes, credential header, models
`request`     a request → chat: contents, settings, schemas
`reply`       a chat reply → responses, whole or streamed
`vocabulary`  reads an object of a request in either spelling; finish reasons, usage and errors of a reply
"""
