"""Anthropic Messages: the dialect of Claude Code and of every client of an Anthropic SDK.

A conversation is a system prompt and a list of entries with content blocks. A reply is one message of blocks (thinking, text, tool_use),
streamed block by block. The signature of a thinking block is the call's handle. Turns record this dialect as `messages`.

`routes`      routes, credential header, models
`request`     a request → chat
`reply`       a chat reply → content blocks, whole or streamed
`vocabulary`  members and content blocks of a request; stop reasons, usage and errors of a reply
"""
