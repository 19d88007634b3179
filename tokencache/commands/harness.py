"""The commands that configure and start harnesses: `tokencache run`, `tokencache env`, `tokencache harnesses`."""

import os
import secrets
import shlex
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from tokencache.adapters import files, models, process
from tokencache.adapters.launch import Launch, prepare
from tokencache.adapters.load import AdapterError, load, load_all
from tokencache.adapters.schema import Adapter
from tokencache.client import Client, ClientError, OutcomeError, RefusedError
from tokencache.commands.completion import complete_harness
from tokencache.commands.console import PROXY_URL, AdminKeyOption, JsonOption, ProxyOption, failed, print_json
from tokencache.commands.rewards import RewardFileError, RewardFileOption, RewardValues, read_reward, version_of
from tokencache.core.outcome import OutcomeKind
from tokencache.errors import HarnessError
from tokencache.session_url import session_key

_NOT_FOUND = 127
"""The exit code of shells for a program that is not found."""

_DIR = Path("DIR")
"""`tokencache env` prints this for the configuration directory if none is named."""

_Harness = Annotated[
    str, typer.Argument(metavar="HARNESS", help="the harness; `tokencache harnesses` lists all", autocompletion=complete_harness)
]
_Args = Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="arguments of the harness, after --")]
_Session = Annotated[str | None, typer.Option("--session", help="name of the rollout; default: a new one, which is printed")]
_Key = Annotated[
    str | None, typer.Option("--key", envvar="TOKENCACHE_KEY", help="API key to send: a registered tck-…; default: tcs-SESSION")
]
_Model = Annotated[str | None, typer.Option("--model", help="name of the model; default: the one that the proxy serves")]
_ConfigDir = Annotated[
    Path | None, typer.Option("--config-dir", help="directory for the configuration of the harness: a new one, or one that tokencache made")
]
_Adapters = Annotated[Path | None, typer.Option("--adapters", envvar="TOKENCACHE_ADAPTERS", help="directory with adapters of your own")]


def run_harness(  # noqa: PLR0917 - one parameter per option
    harness: _Harness,
    args: _Args = None,
    session: _Session = None,
    proxy: ProxyOption = PROXY_URL,
    key: _Key = None,
    model: _Model = None,
    config_dir: _ConfigDir = None,
    adapters: _Adapters = None,
    finish: Annotated[bool, typer.Option("--finish", help="finish the session when the harness has ended")] = False,
    reward_file: RewardFileOption = None,
    admin_key: AdminKeyOption = None,
) -> None:
    """Start a harness that uses the proxy, as one rollout.

    The harness gets a configuration directory of its own: a temporary one,
    or the one that --config-dir names. Your own configuration of it is
    neither read nor changed. Input, output and exit code are passed through.

    tokencache run claude-code --session r17 -- -p "fix the tests"

    tokencache run langgraph --session r17 -- python my_agent.py

    To continue a conversation in a second run (--continue, --resume), give
    both runs the same --session and --config-dir.

    With --finish the session is finished when the harness has ended: as
    failed (harness) if its exit code is not 0 and it has no reward.
    --reward-file names the file to which the harness, or its test, writes the
    reward; one from before the run does not count. If finishing fails or
    there is no reward, the exit code is 1, unless the harness has its own.

    tokencache run hermes --finish --reward-file reward.json -- -q "fix it"
    """
    if reward_file is not None and not finish:
        raise typer.BadParameter("--reward-file needs --finish")
    old = version_of(reward_file) if reward_file is not None else None
    try:
        adapter = load(harness, _own(adapters))
        session = session or _new_session(adapter)
        if config_dir is not None:
            code = _run(adapter, args or [], session, proxy, key, model, config_dir.absolute())
        else:
            with files.temporary_directory(adapter.name) as temporary:
                code = _run(adapter, args or [], session, proxy, key, model, Path(temporary))
    except (AdapterError, HarnessError) as error:
        raise _failed(error) from None
    if finish and not _finish(session, proxy, admin_key, partial(read_reward, reward_file, old) if reward_file else None, code):
        code = code or 1
    raise typer.Exit(code)


def print_environment(  # noqa: PLR0917 - one parameter per option
    harness: _Harness,
    session: _Session = None,
    proxy: ProxyOption = PROXY_URL,
    key: _Key = None,
    model: _Model = None,
    config_dir: _ConfigDir = None,
    adapters: _Adapters = None,
    as_json: JsonOption = False,
) -> None:
    """Print shell commands that make a harness use the proxy.

    For harnesses that run elsewhere (in a container, under a scheduler), and
    for programs of your own. The URL is the proxy's --public-url, or else
    --proxy. Files that the harness needs are written to
    --config-dir; without it, comments show their content. With --json: an
    object with the variables to set (env) and to unset, the files with their
    content, and the command (argv).

    eval "$(tokencache env codex --session r17 --config-dir ./r17)"
    """
    try:
        adapter = load(harness, _own(adapters))
        session = session or _new_session(adapter)
        launch = _prepare(adapter, session, proxy, key, model, config_dir.absolute() if config_dir else _DIR, elsewhere=True)
        if config_dir is not None:
            files.write(config_dir.absolute(), launch.files)
    except (AdapterError, HarnessError) as error:
        raise _failed(error) from None
    if as_json:
        print_json({"session": session, "harness": adapter.name, **_environment(launch)})
        return
    typer.echo("\n".join(_shell_lines(adapter, session, launch, written=config_dir is not None)))


def list_harnesses(adapters: _Adapters = None, as_json: JsonOption = False) -> None:
    """List the harnesses that have an adapter.

    Columns: name, dialects, tested versions, title. With --json also how to
    install and start each.

    tokencache harnesses --adapters ./my-adapters
    """
    try:
        found = load_all(_own(adapters)).values()
    except AdapterError as error:
        raise _failed(error) from None
    if as_json:
        members = ("name", "title", "dialects", "tested", "install", "program")
        print_json([{name: getattr(adapter, name) for name in members} for adapter in found])
        return
    rows = [("NAME", "DIALECTS", "TESTED", "TITLE"), *((a.name, " ".join(a.dialects), " ".join(a.tested) or "-", a.title) for a in found)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _run(  # noqa: PLR0917 - one parameter per option
    adapter: Adapter, args: list[str], session: str, proxy: str, key: str | None, model: str | None, config_dir: Path
) -> int:
    process.find(adapter, [*adapter.program, *args], os.environ.get("PATH"))  # report this before asking the proxy
    launch = _prepare(adapter, session, proxy, key, model, config_dir)
    files.write(config_dir, launch.files)
    return process.run([*launch.argv, *args], launch.environment(os.environ))


def _finish(session: str, proxy: str, admin_key: str | None, read: Callable[[], RewardValues] | None, code: int) -> bool:
    """Finish a session, with the reward that `read` returns, and as failed if there is none and the harness ended with a code.

    Returns false, and prints why, if the file holds no reward or the session was not finished.
    """
    reward, done = None, True
    try:
        reward = read() if read is not None else None
    except RewardFileError as error:
        failed(error)
        done = False
    try:
        with Client(proxy, admin_key) as client:
            over = client.session(session)
            if reward is not None:
                try:
                    over.finish(**msgspec.structs.asdict(reward))
                except RefusedError as error:
                    failed(error)
                    reward, done = None, False
            if reward is None:
                broke = bool(code) and over.state().reward is None
                try:
                    if broke:
                        over.finish(failed=OutcomeKind.HARNESS, detail=f"the harness ended with exit code {code}")
                    else:
                        over.finish()
                except OutcomeError:  # it has said itself what failed, or a deadline passed
                    over.finish()
    except ClientError as error:
        failed(error)
        return False
    return done


def _prepare(  # noqa: PLR0917 - one parameter per option
    adapter: Adapter, session: str, proxy: str, key: str | None, model: str | None, config_dir: Path, *, elsewhere: bool = False
) -> Launch:
    """Prepare a harness that runs here, or `elsewhere`, where it reaches the proxy at `--public-url`."""
    prepare(adapter, proxy, session, key, model or "", config_dir)  # report a wrong URL or name before asking the proxy
    name, context = models.find(proxy, session, key or session_key(session), model)
    url = models.public_url(proxy) if elsewhere else proxy
    return prepare(adapter, url, session, key, name, config_dir, context=context)


def _own(adapters: Path | None) -> tuple[Path, ...]:
    return (adapters,) if adapters is not None else ()


def _new_session(adapter: Adapter) -> str:
    session = f"{adapter.name}-{secrets.token_hex(6)}"
    typer.echo(f"tokencache: session {session}", err=True)
    return session


def _failed(error: Exception) -> typer.Exit:
    failed(error)
    return typer.Exit(_NOT_FOUND if isinstance(error, process.ProgramNotFoundError) else 1)


def _environment(launch: Launch) -> dict[str, Any]:
    """Return what a launch needs, as JSON values."""
    return {
        "env": launch.env,
        "unset": launch.unset,
        "files": {str(path): text for path, text in launch.files.items()},
        "argv": launch.argv,
    }


def _shell_lines(adapter: Adapter, session: str, launch: Launch, *, written: bool) -> Iterator[str]:
    """Yield the lines for a shell. Lines that depend on an unnamed directory are comments."""
    yield f"# {adapter.title}, session {session}"
    pending = {name for name, text in adapter.variables.items() if "{config_dir}" in text and not written}
    yield from (f"unset {name}" for name in launch.unset)
    yield from (f"export {name}={quoted(value)}" for name, value in launch.env.items() if name not in pending)
    if written:
        yield from (f"# wrote {path}" for path in launch.files)
    elif pending or launch.files:
        yield "# The harness needs a configuration. --config-dir DIR writes it; by hand:"
        yield from (f"#   export {name}={quoted(value)}" for name, value in launch.env.items() if name in pending)
        for path, text in launch.files.items():
            yield f"#   in {path}:"
            yield from (f"#     {line}".rstrip() for line in text.splitlines())
    if launch.argv:
        yield f"# Start it with: {shlex.join(launch.argv)}"
    yield from (f"# In your code: {line}" for line in adapter.code.strip().splitlines())


def quoted(value: str) -> str:
    """Quote for a POSIX shell, even if that is not needed, so that all `export` lines look alike."""
    return "'" + value.replace("'", "'\"'\"'") + "'"
