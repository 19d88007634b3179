"""What an engine's chat template makes of messages, as token ids.

`renderer`   messages to ids, through the engine's `/tokenize`
`boundary`   finds where a reply ends in a rendering, with a sentinel in place of the reply
`learned`    renderings with sentinels, and what is remembered of one template
`shapes`     the features of a conversation that its tail may depend on
`tails`      the ids that follow a history, proven to be the end of a full rendering
`edited`     the ids around recorded replies in a history that was edited
`local`      small renderings in this process, with transformers
`agreement`  compares renderers on sample conversations: chat completions, `/tokenize`, the local tokenizer

The package knows an engine only as `upstream.EngineClient`, and as a function that returns the prompt ids of a chat call.
"""
