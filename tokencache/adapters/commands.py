"""`tokencache run`, `tokencache env` and `tokencache harnesses`: a harness pointed at the proxy, without reading its manual."""

import os
import secrets
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from tokencache.adapters import files, process, served
from tokencache.adapters.launch import Launch, prepare
from tokencache.adapters.load import AdapterError, load, load_all
from tokencache.adapters.schema import Adapter
from tokencache.errors import HarnessError
from tokencache.session_url import session_key

_NOT_FOUND = 127
"""The exit code of shells for a program that is not there."""

_PROXY = "http://127.0.0.1:8100"
_LASTING = "/var/tmp"  # noqa: S108 - the directory made in it is new, and the user's alone
_DIR = Path("DIR")
"""Stands for the configuration directory in what `tokencache env` prints, where none is named."""

_Harness = Annotated[str, typer.Argument(metavar="HARNESS", help="which harness; `tokencache harnesses` lists them")]
_Args = Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="arguments of the harness itself, after --", show_default=False)]
_Session = Annotated[
    str | None, typer.Option("--session", help="the rollout's name; default: a new one, which is printed", show_default=False)
]
_Proxy = Annotated[str, typer.Option("--proxy", envvar="TOKENCACHE_PROXY", help="base URL of the proxy, without /v1")]
_Key = Annotated[
    str | None,
    typer.Option("--key", envvar="TOKENCACHE_KEY", help="API key to send: a registered tck-…; default: tcs-SESSION", show_default=False),
]
_Model = Annotated[str | None, typer.Option("--model", help="the model's name; default: the one that the proxy serves", show_default=False)]
_ConfigDir = Annotated[
    Path | None,
    typer.Option("--config-dir", help="directory for the harness's configuration: a new one, or one made here before", show_default=False),
]
_Adapters = Annotated[
    Path | None,
    typer.Option(
        "--adapters", envvar="TOKENCACHE_ADAPTERS", help="directory of your own adapters, beside those that come along", show_default=False
    ),
]


def run_harness(  # noqa: PLR0917 - one parameter per option
    harness: _Harness,
    args: _Args = None,
    session: _Session = None,
    proxy: _Proxy = _PROXY,
    key: _Key = None,
    model: _Model = None,
    config_dir: _ConfigDir = None,
    adapters: _Adapters = None,
) -> None:
    """Start a harness pointed at the proxy, as one rollout.

    It runs in a configuration directory of its own: a temporary one, removed
    at the end, unless --config-dir names one. Your own configuration of it is
    neither read nor changed. Its input, output and exit code are yours.

    tokencache run claude-code --session r17 -- -p "fix the tests"

    tokencache run langgraph --session r17 -- python my_agent.py

    To go on with a conversation in a second run (--continue, --resume), give
    both runs the same --session and --config-dir.
    """
    try:
        adapter = load(harness, _own(adapters))
        session = session or _new_session(adapter)
        if config_dir is not None:
            code = _run(adapter, args or [], session, proxy, key, model, config_dir.absolute())
        else:
            with _temporary_directory(adapter) as temporary:
                code = _run(adapter, args or [], session, proxy, key, model, Path(temporary))
    except (AdapterError, HarnessError) as why:
        raise _failed(why) from None
    raise typer.Exit(code)


def print_environment(  # noqa: PLR0917 - one parameter per option
    harness: _Harness,
    session: _Session = None,
    proxy: _Proxy = _PROXY,
    key: _Key = None,
    model: _Model = None,
    config_dir: _ConfigDir = None,
    adapters: _Adapters = None,
) -> None:
    """Print the lines for a shell that point a harness at the proxy.

    For harnesses that run elsewhere (in a container, under a scheduler), and
    for programs of your own. Files that the harness needs are written to
    --config-dir; without it, comments say what they must hold.

    eval "$(tokencache env codex --session r17 --config-dir ./r17)"
    """
    try:
        adapter = load(harness, _own(adapters))
        session = session or _new_session(adapter)
        launch = _prepare(adapter, session, proxy, key, model, config_dir.absolute() if config_dir else _DIR)
        if config_dir is not None:
            files.write(config_dir.absolute(), launch.files)
    except (AdapterError, HarnessError) as why:
        raise _failed(why) from None
    typer.echo("\n".join(_shell_lines(adapter, session, launch, written=config_dir is not None)))


def list_harnesses(adapters: _Adapters = None) -> None:
    """List the harnesses that have an adapter.

    The columns are name, dialects, tested versions and title.

    tokencache harnesses --adapters ./my-adapters
    """
    try:
        found = load_all(_own(adapters)).values()
    except AdapterError as why:
        raise _failed(why) from None
    rows = [("NAME", "DIALECTS", "TESTED", "TITLE"), *((a.name, " ".join(a.dialects), " ".join(a.tested) or "-", a.title) for a in found)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _run(  # noqa: PLR0917 - the options as they came
    adapter: Adapter, args: list[str], session: str, proxy: str, key: str | None, model: str | None, config_dir: Path
) -> int:
    process.find(adapter, [*adapter.program, *args], os.environ.get("PATH"))  # told before the proxy is asked
    launch = _prepare(adapter, session, proxy, key, model, config_dir)
    files.write(config_dir, launch.files)
    return process.run([*launch.argv, *args], launch.environment(os.environ))


def _temporary_directory(adapter: Adapter) -> tempfile.TemporaryDirectory[str]:
    """Make a directory that goes with its harness, whose stragglers may still be writing to it then.

    Not where temporary files usually are: Codex 0.169 puts no helper programs under TMPDIR ("Refusing to create helper
    binaries under temporary dir").
    """
    place = _LASTING if os.access(_LASTING, os.W_OK) else None
    return tempfile.TemporaryDirectory(prefix=f"tokencache-{adapter.name}-", dir=place, ignore_cleanup_errors=True)


def _prepare(  # noqa: PLR0917 - the options as they came
    adapter: Adapter, session: str, proxy: str, key: str | None, model: str | None, config_dir: Path
) -> Launch:
    prepare(adapter, proxy, session, key, model or "", config_dir)  # a wrong URL or name is told before anything is asked
    name, context = served.find(proxy, key or session_key(session), model)
    return prepare(adapter, proxy, session, key, name, config_dir, context=context)


def _own(adapters: Path | None) -> tuple[Path, ...]:
    return (adapters,) if adapters is not None else ()


def _new_session(adapter: Adapter) -> str:
    session = f"{adapter.name}-{secrets.token_hex(6)}"
    typer.echo(f"tokencache: session {session}", err=True)
    return session


def _failed(why: Exception) -> typer.Exit:
    typer.secho(f"tokencache: {why}", fg="red", err=True)
    return typer.Exit(_NOT_FOUND if isinstance(why, process.ProgramNotFoundError) else 1)


def _shell_lines(adapter: Adapter, session: str, launch: Launch, *, written: bool) -> Iterator[str]:
    """The lines for a shell; what depends on a directory that was not named stands in comments."""
    yield f"# {adapter.title}, session {session}"
    pending = {name for name, text in adapter.variables.items() if "{config_dir}" in text and not written}
    yield from (f"unset {name}" for name in launch.unset)
    yield from (f"export {name}={quoted(value)}" for name, value in launch.env.items() if name not in pending)
    if written:
        yield from (f"# wrote {path}" for path in launch.files)
    elif pending or launch.files:
        yield "# It keeps a configuration. With --config-dir DIR one of its own is written there; by hand, it takes:"
        yield from (f"#   export {name}={quoted(value)}" for name, value in launch.env.items() if name in pending)
        for path, text in launch.files.items():
            yield f"#   in {path}:"
            yield from (f"#     {line}".rstrip() for line in text.splitlines())
    if launch.argv:
        yield f"# Start it with: {shlex.join(launch.argv)}"
    yield from (f"# In your code: {line}" for line in adapter.code.strip().splitlines())


def quoted(value: str) -> str:
    """Quote for a POSIX shell, always: `export` lines look alike whatever is in them."""
    return "'" + value.replace("'", "'\"'\"'") + "'"
