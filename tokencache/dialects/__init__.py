"""Dialects: one codec per wire format that harnesses speak. The route selects the codec.

`chat`           OpenAI chat completions: the request as read, and what the harness is shown of the reply
`growth`         a body that begins like the session's last one is read from where that one ended
`chat_messages`  its messages ↔ canonical messages
"""
