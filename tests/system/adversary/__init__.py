"""Runs random agent sessions against the proxy's real code, and judges every message of every prompt with an oracle.

==================  ====================================================================================================
`stack`             the proxy without HTTP, with an engine in this process
`harness`           random sessions: what clients do to their histories, and what an adversary would do
`dialects`          the same conversation in each of the four dialects
`observed`          what the oracle observes and finds
`oracle`            decides what is true of every message, and compares each prompt with it
`template_reading`  how a template writes replies, read from small renderings
`run`               runs and counts many sessions; start it with `python -m tests.system.adversary --turns 100000`
==================  ====================================================================================================
"""
