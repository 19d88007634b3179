"""Browsing: what a person looks at of a session, in pieces small enough to be asked for while calls go on.

`routes`     the JSON that the viewer (`tokencache.viewer`) shows, each route behind the trainer's key
`summaries`  all sessions, a page at a time
`outline`    a session's turns as a tree of sequences, with its figures; from the turns alone, without a token
`window`     a sequence's tokens, some thousand at a time
`texts`      what a token says, by the engine's `/detokenize`
`echoes`     what was served and what came back, side by side
"""
