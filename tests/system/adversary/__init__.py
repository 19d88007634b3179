"""The permanent adversary: random agent sessions against the proxy's real code, and an oracle that judges every message of every prompt.

===========  ==========================================================================================================
`stack`      the proxy without HTTP, before an engine in this process
`harness`    random sessions: what agent harnesses do to their histories, and what an adversary would do
`dialects`   the same conversation in each of the four dialects
`oracle`     what is true of every message, and how a prompt is held against it
`run`        many sessions, counted; `python -m tests.system.adversary --turns 100000` is the way in
===========  ==========================================================================================================
"""
