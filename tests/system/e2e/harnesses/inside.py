"""The inner half of `namespace.py`: the first process in the new namespaces. Standard library only.

It brings up the loopback interface (the only one), mounts the run's folder at its fixed path, forwards bytes between a local port and the
Unix socket to the outside, runs the one command, and exits with its exit status. When it ends, the kernel ends everything else in its
process namespace.

A run that is to be interrupted names a byte string and a count: once these bytes were sent to the harness that many times on one
connection, the harness gets SIGINT, as from Ctrl-C. So the moment is the same on every machine, however fast.

usage: inside.py SPECIFICATION, a JSON object; `namespace.py` writes it.
"""

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import sys

SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 0x1
TIMED_OUT = 124


def bring_loopback_up():
    """Does what `ip link set lo up` does; not every machine has that command."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh14x", b"lo", 0)
        (flags,) = struct.unpack_from("h", fcntl.ioctl(any_socket, SIOCGIFFLAGS, request), 16)
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | IFF_UP))


async def pump(reader, writer, after=lambda data: None):
    """Forwards data until it ends, then forwards the end; `after` gets each forwarded piece."""
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
            after(data)
        writer.write_eof()


def counting(words, times, act):
    """Returns a function that calls `act` once, when `words` have been forwarded that many times, possibly in pieces."""
    passed = bytearray()

    def after(data):
        before = passed.count(words)
        passed.extend(data)
        if before < times <= passed.count(words):
            act()

    return after


async def forward(reader, writer, way_out, after):
    """Carries one connection of the harness over the Unix socket."""
    try:
        outside, back = await asyncio.open_unix_connection(way_out)
        try:
            await asyncio.gather(pump(reader, back), pump(outside, writer, after))
        finally:
            back.close()
    except OSError as why:
        print(f"cannot reach the socket outside of the namespace: {why}", file=sys.stderr)
    finally:
        writer.close()


async def run(wanted):
    process = None

    def interrupt():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)

    def on_connection(reader, writer):
        behind, times = wanted["interrupt"] or ("", 0)
        after = counting(behind.encode(), times, interrupt) if times else lambda data: None
        return forward(reader, writer, wanted["socket"], after)

    server = await asyncio.start_server(on_connection, "127.0.0.1", wanted["port"])
    async with server:
        process = await asyncio.create_subprocess_exec(
            *wanted["command"], cwd=wanted["cwd"], env=wanted["environment"], stdin=asyncio.subprocess.DEVNULL, start_new_session=True
        )
        try:
            return await asyncio.wait_for(process.wait(), wanted["seconds"])
        except TimeoutError:
            return TIMED_OUT
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def main():
    wanted = json.loads(sys.argv[1])
    if wanted["isolated"]:
        bring_loopback_up()
        socket.sethostname("lab")
        subprocess.run(["mount", "--bind", wanted["folder"], wanted["run_dir"]], check=True, stdin=subprocess.DEVNULL)
    code = asyncio.run(run(wanted))
    # not sys.exit: connections that the harness left half open no longer matter
    sys.stdout.flush()
    os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
