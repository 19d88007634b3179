"""Contains a driver for each kind of engine.

`base`               defines what a driver does
`registry`           lists the drivers, in the order in which `--engine auto` tries them
`vllm`               vLLM: 0.27 and later without changes, older releases with the plugin
`text_prompts`       a vLLM that accepts exact prompts only as text completions, and parses with `derender`
`token_prompts`      a vLLM behind a proxy that disaggregates prefill: exact prompts to `/inference/v1/generate`, parsed with `derender`
`derendered`         what the last two share
`bound_replies`      sends calls that a grammar binds and that hide their reasoning to the route that binds them as directly
`image_prompts`      exact prompts with images for a vLLM without the plugin
`nemo_rl`            NeMo RL's vLLM worker
`nemo_gym`           NeMo Gym's model server
`dynamo`             the frontend of NVIDIA's Dynamo
`parsed_completion`  makes a chat completion from the answer of a route that samples but does not parse
"""
