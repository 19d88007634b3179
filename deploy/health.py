#!/usr/bin/env -S python3 -IS
"""Checks the health of the proxy in this container: `tokencache-health [/healthz | /readyz]`. Exit code 0: alive, or ready.

For container health checks and Kubernetes' `exec` probes in an image without curl. It imports only the standard library, so it starts fast,
and it ignores HTTP_PROXY, unlike `urllib`.
"""

import http.client
import os
import sys

TIMEOUT_SECONDS = 4.0

host = os.environ.get("TOKENCACHE_HOST", "127.0.0.1")
port = int(os.environ.get("TOKENCACHE_PORT", "8100"))
path = sys.argv[1] if len(sys.argv) > 1 else "/healthz"
connection = http.client.HTTPConnection({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port, timeout=TIMEOUT_SECONDS)  # noqa: S104
try:
    connection.request("GET", path)
    response = connection.getresponse()
    body = response.read(4096).decode(errors="replace")
except OSError as why:
    sys.exit(f"{path}: {why}")
sys.exit(None if response.status == http.HTTPStatus.OK else f"{path}: {response.status} {body}")
