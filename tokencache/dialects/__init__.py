"""Dialects: one codec per wire format that harnesses speak. The route selects the codec.

`chat`           OpenAI chat completions: the request as read, and what the harness is shown of the reply
`chat_messages`  its messages ↔ canonical messages
"""
