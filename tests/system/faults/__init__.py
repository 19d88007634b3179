"""Fault tests: real processes are killed, frozen and disconnected, and the results compared with the engine's own log.

=============  ======================================================================================================
`processes`    engines, proxies and Redis, each a separate process that can be killed, frozen and started again
`harness`      a harness that keeps what it received, in several dialects, and retries on any replica when a call fails
`dialects`     how such a harness writes requests and reads answers: chat completions, Messages, Responses
`checker`      compares clients, the engine's log and exports: lost, false, unmarked, marked
`stack`        all of these together: what most tests here begin with
`pipe`         a connection that can be slowed and cut
`chaos`        the campaign: `make chaos`; `disasters` are the faults that it injects into a deployment
`timeline`     the campaign's own log, which explains a hole that no incident names
`cut`          cuts the network between namespaces
=============  ======================================================================================================
"""
