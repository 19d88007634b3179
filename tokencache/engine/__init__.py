"""Engines: what stands upstream, and what it can do.

`upstream`  the HTTP client: one pool, no limits of its own
`pool`      several engines: which of them a session goes to
`roster`    which engines there are, shared by all replicas
`health`    whether an engine is there, and is what it was
`wire`      the connection that a stream comes on: most of it is settled where it arrives
`driver`    how an exact prompt is handed in, and where ids come back: what a driver is
`vllm`      the driver for vLLM, and for older ones with our plugin
`nemo`      the drivers for NeMo RL's worker and NeMo Gym's model server
`registry`  the drivers there are
`chunks`    a whole reply as the stream that it would have been
`reply`     what an engine said, collected
`weights`   which weights sampled which tokens, as far as the engine says it
`logprobs`  what an engine's log probabilities are, found out by asking it
`probe`     what an engine can do, found out by asking it
`questions` the probe's requests: nothing is concluded while one is unanswered
`standing`  what the probe came to, and when it is repeated
"""
