"""Dialects: one codec per wire format that harnesses speak. The route selects the codec.

`chat`            OpenAI chat completions: the request as the harness wrote it
`chat_messages`   its messages ↔ canonical messages
`chat_rendering`  what besides the messages decides how it becomes a prompt
`chat_reply`      what the harness is shown of the reply
`body`            a request's members, raw, and their values
`growth`          a body that begins like the session's last one is read from where that one ended

`messages`          Anthropic Messages: the codec, its models and errors
`messages_request`  a request's members → chat; `messages_history`: system and messages → chat messages
`messages_reply`    the chat reply as content blocks, whole or streamed
`messages_blocks`, `messages_said`, `messages_json`, `messages_errors`: what they share
"""
