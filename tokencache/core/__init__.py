"""Decides which turn a history continues, which ids are spliced, and which sequences a trainer gets. Pure functions, no I/O.

==============  =====================================================================================================
`messages`      messages in the form that all dialects are translated to, and their digests
`ids`           token ids as bytes
`chain`         conversations as chains of digests, and look-up keys
`rules`         every difference that an echo may have from the reply that was served
`verdict`       compares an echo with the reply that was served
`added_text`    recognizes an echo that has more text than was served
`continued`     joins the parts of a reply that a client continued
`evidence`      hashes of the history that a turn answered
`match`         finds the recorded turn that a history continues
`edited`        tells whether an unrecognized reply is an edited one
`splice`        joins prefix and tail to the prompt that is sent
`turn`          the record of one model call
`media`         identifies images and other media by their content
`expansion`     compact and expanded ids of a prompt with images
`experts`       routed experts, one row for each token
`weights`       policy versions, and what the trainer announced about the weights
`forced`        the ids of a reply that a thinking budget forced
`context`       the stored request of a turn: its messages and tools
`context_edits` inserts and replaces messages of it, and why that may be refused
`lineage`       the turns of a session as sequences for a trainer
`agents`        how a harness names the agent that makes a call
`fork`          the turns that a fork shares with the session that it left
`lost_text`     what the model sampled and a parser of the engine dropped
`drift`         where plain renderings differ from what was sent, and why
`session`       a session's state, settings, labels and rewards
`incidents`     the kinds of incidents
`outcome`       how a rollout ended: well, or by which kind of failure
`finish`        the reasons with which an engine ends a reply
`reasons`       the reasons why a turn does not simply continue another
`strict_json`   JSON that every reader accepts
==============  =====================================================================================================

Read `messages`, `chain`, `verdict` and `match` in this order to follow a call. Nothing here imports asyncio, aiohttp, redis or
transformers, nor any other part of tokencache; a test ensures that.
"""
