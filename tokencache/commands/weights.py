"""`tokencache weights`: shows and sets the version of the engines' weights, and runs a command while they are replaced."""

import os
import time
from collections.abc import Iterator
from typing import Annotated, cast, get_args

import typer

from tokencache.adapters import process
from tokencache.adapters.load import AdapterError
from tokencache.client import Client, ClientError, WeightsInfo
from tokencache.client.weight_operations import DEFAULT_TIMEOUT
from tokencache.commands.console import PROXY_URL, AdminKeyOption, JsonOption, ProxyOption, calling, failed, print_json
from tokencache.core.weights import PauseMode

_Engines = Annotated[list[str] | None, typer.Option("--engine", metavar="URL", help="Only this engine. May be repeated. Default: all.")]
_Owner = Annotated[
    str,
    typer.Option("--owner", metavar="NAME", help="Who updates the weights. Others wait until the update has ended.", show_default=False),
]
_Timeout = Annotated[
    float, typer.Option("--timeout", metavar="SECONDS", help="The update ends by itself after this time; the version is then unknown.")
]
_SHOWN = 10
"""Versions of the history that are printed."""

weights_app = typer.Typer(
    help="Show, announce or replace the version of the engines' weights.", no_args_is_help=True, rich_markup_mode=None
)


@weights_app.command("show")
def show_weights(as_json: JsonOption = False, proxy: ProxyOption = PROXY_URL, admin_key: AdminKeyOption = None) -> None:
    """Print the versions of the engines' weights, and their history.

    tokencache weights show
    """
    with calling(proxy, admin_key) as client:
        _print(client.weights(), as_json=as_json)


@weights_app.command("set")
def set_weights(  # noqa: PLR0917 - one parameter per option
    version: Annotated[str | None, typer.Argument(metavar="VERSION", help="Version that the engines have now: a number or a name.")] = None,
    updating: Annotated[bool, typer.Option("--updating", help="They are being replaced: new calls wait until a version is set.")] = False,
    engines: _Engines = None,
    owner: _Owner = "",
    timeout: _Timeout = DEFAULT_TIMEOUT,
    as_json: JsonOption = False,
    proxy: ProxyOption = PROXY_URL,
    admin_key: AdminKeyOption = None,
) -> None:
    """Announce the version of the weights that the engines have.

    Turns then say which version sampled them, and the prefix cache is not
    used across versions. Announce the first version before the first rollout.

    tokencache weights set 7

    A trainer that pauses the engines itself says so before it does, and sets
    the version before it resumes them:

    tokencache weights set --updating
    """
    if (version is None) != updating:
        raise typer.BadParameter("give a VERSION, or --updating")
    with calling(proxy, admin_key) as client:
        named = engines or ()
        known = client.set_weights(version, engines=named, phase="updating" if updating else "ready", owner=owner, timeout=timeout)
        _print(known, as_json=as_json)


@weights_app.command("update")
def update_weights(  # noqa: PLR0917 - one parameter per option
    version: Annotated[str, typer.Argument(metavar="VERSION", help="Version of the new weights: a number or a name.")],
    command: Annotated[list[str], typer.Argument(metavar="COMMAND", help="Command that replaces the weights, after --.")],
    mode: Annotated[
        str,
        typer.Option(
            "--mode",
            metavar="|".join(get_args(PauseMode)),
            help="What happens to replies under way: they are cut, frozen, or end first. none: the command itself pauses the engines.",
        ),
    ] = "abort",
    keep_cache: Annotated[bool, typer.Option("--keep-cache", help="Do not empty the engines' prefix caches.")] = False,
    engines: _Engines = None,
    owner: _Owner = "",
    timeout: _Timeout = DEFAULT_TIMEOUT,
    proxy: ProxyOption = PROXY_URL,
    admin_key: AdminKeyOption = None,
) -> None:
    """Run a command that replaces the weights, with the engines paused.

    New calls wait until it has ended. If it succeeds, the engines go on with
    the new version. If it fails, they go on too, their version is unknown, and
    the exit code is that of the command.

    tokencache weights update 8 -- ./sync-weights.sh

    The engines need VLLM_SERVER_DEV_MODE=1, except with --mode none.
    """
    if mode not in get_args(PauseMode):
        raise typer.BadParameter(f"--mode: {mode!r} is not one of {', '.join(get_args(PauseMode))}")
    try:
        with (
            Client(proxy, admin_key) as client,
            client.update_weights(
                version, mode=cast("PauseMode", mode), clear_cache=not keep_cache, engines=engines or (), owner=owner, timeout=timeout
            ),
        ):
            code = process.run(command, os.environ)
            if code:
                raise typer.Exit(code)
    except (AdapterError, ClientError, ValueError) as error:
        raise failed(error) from None


def _print(known: WeightsInfo, *, as_json: bool) -> None:
    if as_json:
        print_json(known)
        return
    for line in _lines(known):
        typer.echo(line)


def _lines(known: WeightsInfo) -> Iterator[str]:
    yield f"version   {known.version or 'unknown'}"
    if known.until is not None:
        yield f"updating  by {known.owner or 'an unnamed owner'}; it ends by itself in {max(0.0, known.until - time.time()):.0f} s"
    for engine in known.engines:
        yield f"engine    {engine.url}  {engine.version or 'unknown'}{'  updating' if engine.phase == 'updating' else ''}"
    for one in known.history[-_SHOWN:]:
        yield f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(one.at))}  {one.version}"
