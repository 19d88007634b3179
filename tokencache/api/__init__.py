"""The HTTP API of the trainer and of the viewer, under `/tokencache/v1/` and `/tokencache/ui/`.

`openapi`       the table of all routes, and the OpenAPI document
`routes`        handlers for sessions, turns, trajectories and keys
`lifecycle`     handlers that create, label, reward, finish, seal and delete sessions
`requests`      the bodies of their requests
`listing`       lists sessions with filters, a page at a time; `summaries` all of them in one line each, for viewers
`lost_text`     decodes replies, and compares them with what was served
`scores`        a handler that scores turns after edited messages
`runs`          handlers for the figures of runs
`queue`         delivers finished sessions to consumers
`gauges`        the state of the queue and the store, as metrics and for viewers
`kept`          keeps what is costly to read, for those who ask regularly
`demand`        what consumers could take from it, from what they asked for
`media`         handlers for the images and other media of a session
`weights`       handlers for the weights of the engines
`conditions`    says under which conditions the proxy records
`engines`       handlers that add, drain and remove engines
`capacity`      reports how many sessions fit into the KV caches of the engines; `admission` lets creations wait for room
`viewer`        handlers and pages of the viewer
`auth`          the check of the admin key
`http`          JSON responses and query parameters
`reader`        reads a session from the store
`export_worker` a process for large exports, so that they do not delay calls
`drift`         measures how spliced prompts differ from plain renderings
"""
