"""OpenAI chat completions: what harnesses speak most, and what every other dialect is turned into.

There is no codec: the request's members stay raw JSON, and the reply is the engine's own bytes.

`call`       the request as the harness wrote it, and what of it is known
`growth`     a body taken apart; one that begins like the session's last is read from where that one ended
`messages`   an entry of `messages` ↔ a canonical message
`sampling`   parameters that are used whatever the harness asks for
`rendering`  what besides the messages decides how it becomes a prompt
`reply`      what the harness is shown of the reply
"""
