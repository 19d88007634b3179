"""Runs the proxy on a port, in one process or several, until it receives a signal to stop.

==================  =================================================================================================
`app`               makes the parts of the proxy and wires them together
`routing`           decides what serves a request
`responses_socket`  serves the Responses dialect over WebSocket
`dry_run`           describes what would be started, and ends
`serve`             runs the application on a socket; what `tokencache serve` does in one process
`workers`           runs it in several processes on one port
`listener`          accepts connections, as many as file descriptors allow
`http_guard`        refuses requests that two servers could read differently
`drain`             lets requests in progress finish when the server stops
==================  =================================================================================================
"""
