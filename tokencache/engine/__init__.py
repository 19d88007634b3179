"""Connects to the engines: finds out what each can do, sends prompts, and reads replies.

`upstream`         sends HTTP requests to one engine; `connections` keeps the connections to it
`routes`           the engine's routes that sample nothing
`drivers`          all code that depends on the kind of engine
`template`         renders conversations, and finds the tail after a history
`probe`            tests what an engine can do; `logprob_kind` tests its log probabilities
`thinking`         finds the ids with which an engine ends a thought whose budget is used up
`earlier_thoughts` finds what a thought in an earlier reply changes for the next one
`images`           tests whether an engine accepts exact prompts with images (`image_support`); `image_names` names images
`prefixes`         names exact prompts by a hash, so that requests do not grow with the conversation
`model`            one engine and its models, with the findings about them
`health`           checks whether an engine is reachable and still the same
`ranks`            finds the data-parallel ranks of an engine, and pins a request to one; `routers` recognizes servers that place sessions
`groups`           groups the engines by the model that they serve
`pool`             chooses the engine for a call; `placement` decides by the tokens that sessions hold on each
`capacity`         reads the size of an engine's KV cache, and computes how many sessions fit
`admission`        decides when a new session may begin
`session_ends`     tells what places sessions behind the URLs that one has ended
`membership`       shares the list of engines between the replicas of the proxy
`weight_updates`   replaces the weights of the engines; `announced_weights` follows what trainers announce about them
`reply`            collects a reply; `prompt_echo` reads the prompt's ids in it, and cuts long values out of its JSON
`figures`          decides what the figures of a reply prove about its ids
`chunks`           splits a whole reply into the chunks of a stream
`derender`         makes messages from token ids with vLLM's own parsers
`generate`         speaks vLLM's routes for prompts with images
`stream_protocol`  processes the events of a stream directly when they arrive
"""
