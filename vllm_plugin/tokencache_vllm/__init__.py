"""Contains a plugin that makes vLLM 0.20 to 0.26 accept exact prompts, 0.27 to 0.33 prefixes by hash, and 0.32 images.

vLLM 0.27 and later accept a whole prompt as ids, `kv_transfer_params.prompt_token_ids`, and do everything else as usual. This package adds
that to older versions. It is not part of the proxy: it is installed next to vLLM, which loads it into its own processes. So it imports
nothing from the proxy, and imports vLLM only to patch it.

One function of vLLM renders for chat completions, messages, Responses and `/tokenize`: `preprocess_chat`. The plugin wraps it. For a
request that supplies ids, the function runs with a replacement renderer that returns those ids instead of a rendering. So parsers,
grammars, streaming and the start of reasoning are vLLM's own.

`entry`               the entry points for vLLM: a general plugin (0.20 to 0.25) and an endpoint plugin (0.26 and later)
`patch`               wraps the right function for each version, and refuses versions that it does not know
`supplied_ids`        reads and validates the ids that a request supplies
`renderer`            replaces vLLM's renderer for one request
`boundary`            proves where the last reply of a conversation ends
`images`              accepts exact prompts with images, in 0.32
`response_headers`    adds headers to responses, for example where the images are in a prompt
`prefixes`            accepts prompts whose beginning is named by a hash, in 0.27 to 0.33
`kept_prefixes`       keeps the ids of recent conversations for that
`packed_replies`      returns ids and log probabilities of replies as packed bytes
`detokenizer`         starts the detokenizer with the end of a long prompt

Install it with `pip install ./vllm_plugin`, using the pip of vLLM's environment. `VLLM_PLUGINS=tokencache` loads it in every version.
gpt-oss is rendered elsewhere (Harmony), and the plugin does not change that: the proxy's probe finds the level `record` for it.
"""
