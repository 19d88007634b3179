#!/usr/bin/env -S python3 -IS
"""Checks the health of the proxy in this container: `tokencache-health [/healthz | /readyz]`. Exit code 0: alive, or ready.

For container health checks and Kubernetes' `exec` probes in an image without curl. It imports only the standard library, so it starts fast,
and it ignores HTTP_PROXY, unlike `urllib`. The address is that of the container's own command (`serve --port 9000`), or of its environment.
"""

import argparse
import http.client
import os
import pathlib
import sys

TIMEOUT_SECONDS = 4.0

parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
parser.add_argument("--host", default=os.environ.get("TOKENCACHE_HOST", "127.0.0.1"))
parser.add_argument("--port", default=os.environ.get("TOKENCACHE_PORT", "8100"))
command = os.fsdecode(pathlib.Path("/proc/1/cmdline").read_bytes()).split("\0")
given, _ = parser.parse_known_args(command[command.index("serve") :] if "serve" in command else [])
host, port = given.host, int(given.port)
path = sys.argv[1] if len(sys.argv) > 1 else "/healthz"
connection = http.client.HTTPConnection({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port, timeout=TIMEOUT_SECONDS)  # noqa: S104
try:
    connection.request("GET", path)
    response = connection.getresponse()
    body = response.read(4096).decode(errors="replace")
except OSError as why:
    sys.exit(f"{path}: {why}")
sys.exit(None if response.status == http.HTTPStatus.OK else f"{path}: {response.status} {body}")
