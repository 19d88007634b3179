"""Render: what the template makes of messages, and above all of the *new* messages only.

`renderer`   messages → ids, through the engine's `/tokenize`
`boundary`   a sentinel in the assistant's place: where does a reply end, in ids?
`tails`      the ids that come after a history, proven to be what a full rendering ends with
`local`      small renderings in this process, by transformers; `prepared` is what vLLM does to messages before that,
             `trial` the table on which it must agree with the engine first
`agreement`  do `/tokenize` and chat completions render the same?
"""
