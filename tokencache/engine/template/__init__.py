"""Finds out which token ids an engine's chat template writes for messages, and which around recorded replies.

`renderer`   renders messages to ids, with the engine's `/tokenize`
`boundary`   finds where a reply ends in a rendering, with a sentinel in place of the reply
`learned`    renders with sentinels, and remembers what was learned about one template
`shapes`     defines the features of a conversation that its tail may depend on
`tails`      finds the ids that follow a history, proven to be the end of a full rendering
`calls`      finds the text with which the template ends every call
`edited`     finds the ids around recorded replies in a history that was edited
`visible`    finds the part of each recorded reply that the template still shows
`local`      makes small renderings in this process, with transformers
`agreement`  compares renderers on sample conversations: chat completions, `/tokenize`, the local tokenizer

The package uses an engine only as an `upstream.EngineClient`, and as a function that returns the prompt ids of a chat call.
"""
