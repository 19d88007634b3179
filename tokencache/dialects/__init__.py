"""Dialects: one codec per wire format that harnesses speak. The route selects the codec (`registry`).

What a codec is, and what it may not know, is said in `dialect`. A harness speaks one of these:

`chat/`        OpenAI chat completions, which everything else becomes; the harness sees the engine's own bytes
`messages/`    Anthropic Messages
`responses/`   OpenAI Responses
`gemini/`      Google's generateContent
`completions`  text completions: relayed and recorded, never translated
`probes`       what harnesses ask before they call a model

A package that translates has a `codec` (routes, models, errors), a `request` or its parts (→ chat) and a `reply` (chat →).
What they share:

`lenient`      JSON as strangers write it
`body`         a request's members, raw, where most of it is passed on as it came
`gym`          token ids on messages, as NeMo Gym has them
`heard`        what is read of a chat completion or a chunk of one
`places`       places in a request, as errors name them
`encoder`    speakers that show the engine's own bytes
`sse`          server-sent events
"""
