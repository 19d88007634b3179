#!/usr/bin/env -S python3 -IS
"""Ask the proxy of this container how it is: `tokencache-health [/healthz | /readyz]`. Exit code 0: well, or ready.

For containers' health checks and Kubernetes' `exec` probes, in an image without curl. It starts fast, for it imports nothing
but the standard library, and it heeds no HTTP_PROXY, as `urllib` would.
"""

import http.client
import os
import sys

PATIENCE_SECONDS = 4.0

host = os.environ.get("TOKENCACHE_HOST", "127.0.0.1")
port = int(os.environ.get("TOKENCACHE_PORT", "8100"))
path = sys.argv[1] if len(sys.argv) > 1 else "/healthz"
asked = http.client.HTTPConnection({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port, timeout=PATIENCE_SECONDS)  # noqa: S104
try:
    asked.request("GET", path)
    answer = asked.getresponse()
    said = answer.read(4096).decode(errors="replace")
except OSError as why:
    sys.exit(f"{path}: {why}")
sys.exit(None if answer.status == http.HTTPStatus.OK else f"{path}: {answer.status} {said}")
