"""What happens when something dies: real processes, killed, frozen and cut off, held against the engine's own books.

=============  ======================================================================================================
`processes`    engines, proxies and Redis, each a process of its own, that can be killed, frozen and started again
`harness`      a harness that keeps what it was served, in several dialects, and goes on elsewhere when a call fails
`dialects`     how such a harness asks and is answered: chat completions, Messages, Responses
`checker`      clients, books and exports held against each other: lost, false, unmarked, marked
`stack`        all of these together: what most tests here begin with
`pipe`         a wire that can be slowed and cut
`chaos`        the campaign: `make chaos`; `disasters` is what it does to a deployment
`cut`          a cable is pulled between namespaces
=============  ======================================================================================================
"""
