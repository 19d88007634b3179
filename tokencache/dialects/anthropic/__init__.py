"""Anthropic Messages: what Claude Code and everything else that uses an Anthropic SDK speaks.

A conversation is a system prompt and entries of content blocks; a reply is one message of blocks (thinking, text, tool_use),
streamed block by block. Thinking is signed with the call's handle.

`codec`    the routes, models, errors
`request`  a request's members → chat; `history`: system and messages → chat messages
`reply`    the chat reply as content blocks, whole or streamed; `ending`: why it ended, and what it used
`blocks`, `members`, `errors`: what they share
"""
