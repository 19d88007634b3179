"""Engines: what stands upstream, and what it can do.

`upstream`  the HTTP client: one pool, no limits of its own
`vllm`      the driver for stock vLLM 0.27 and later: how ids are handed in, and asked for
`reply`     what an engine said, collected
`weights`   which weights sampled which tokens, as far as the engine says it
`logprobs`  what an engine's log probabilities are, found out by asking it
`probe`     what an engine can do, found out by asking it
"""
