"""The viewer: a page at `/tokencache/ui/` that shows recorded sessions and why a rollout split.

`routes`     serves the page and the JSON that it shows
`sessions`   the outline of one session
`tokens`     the tokens of a sequence: ids, kinds, log probabilities and texts
`transcript` the conversation of a sequence, message by message
`groups`     the sessions of a group, compared
`comparison` each reply as it was served and as the harness sent it back
`static`     the page: HTML, style sheets and JavaScript modules, written by hand, without a build step or external parts

The page contains no data. It fetches data with the trainer's key. Everything that a model, a harness or a user wrote is untrusted: it
becomes text nodes, never markup, and the content security policy allows only the page's own scripts.
"""
