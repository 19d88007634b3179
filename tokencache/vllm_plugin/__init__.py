"""The plugin for vLLM 0.20 to 0.26: exact prompts for engines that do not take them by themselves.

From 0.27 on vLLM takes a whole prompt as ids, `kv_transfer_params.prompt_token_ids`, and does everything else as ever. This
package teaches it to older versions. It is not the proxy's: it is installed where vLLM is and loaded by vLLM into its own
processes, so it imports nothing of the proxy's and vLLM only when it is asked to patch it.

One function of vLLM renders for chat completions, messages, Responses and `/tokenize`: `preprocess_chat`. It is wrapped, and for
a request that supplies ids it is run with a stand-in for the renderer that answers with those ids instead of a rendering.
So parsers, grammars, streaming and the reasoning's start are vLLM's own.

`entry`     what vLLM loads: a general plugin (0.20 to 0.25) and an endpoint plugin (0.26)
`patch`     which function is wrapped in which version; refuses what it does not know
`asked`     the ids that a request supplies, read and validated
`prompts`   the stand-in for the renderer
`boundary`  where the last reply of a conversation ends, proven (pure)

Install it with `pip install '.[vllm]'` and the pip of vLLM's environment; `VLLM_PLUGINS=tokencache` names it in every version.
gpt-oss is rendered elsewhere (Harmony) and is left as it is: the proxy's probe finds `record` for it.
"""
