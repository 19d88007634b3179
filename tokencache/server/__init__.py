"""Serving: the application on a port, in one process or several, until told to stop.

==============  =====================================================================================================
`server`        the application on a socket; what `tokencache serve` runs
`workers`       several processes on one port; `worker` is one of them
`door`          where connections come in, as many as there are descriptors for
`descriptors`   open files: how many, and what that means
`guarding`      what comes in before it is a request that anybody reads
`drain`         how a server ends without cutting off what it is doing
==============  =====================================================================================================
"""
