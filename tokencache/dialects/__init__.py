"""Dialects: one codec per wire format that harnesses speak. The route selects the codec.

`chat`            OpenAI chat completions: the request as the harness wrote it
`chat_messages`   its messages ↔ canonical messages
`chat_rendering`  what besides the messages decides how it becomes a prompt
`chat_reply`      what the harness is shown of the reply
`body`            a request's members, raw, and their values
`growth`          a body that begins like the session's last one is read from where that one ended
"""
