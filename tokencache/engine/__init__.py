"""Talks to the engines: sends prompts, reads replies, and knows what each engine can do.

`upstream`         sends HTTP requests to one engine
`drivers`          everything in which kinds of engines differ
`template`         renders conversations, and finds the tail after a history
`probe`            finds out what an engine can do, by testing it; `logprob_kind` does so for its log probabilities
`model`            one engine and its models, with what was found and learned about them
`health`           checks whether an engine is reachable and still the same
`pool`             chooses the engine for a call
`membership`       shares the list of engines between the replicas of the proxy
`reply`            collects a reply; `prompt_echo` the prompt's ids in it; `long_values` cuts out what is long
`chunks`           turns a whole reply into the stream that it would have been
`stream_protocol`  settles the events of a stream where they arrive
"""
