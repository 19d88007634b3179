"""The commands that make and change sessions: `tokencache create`, `fork`, `finish`, `reward`, `label`, `seal` and `delete`.

A command that takes several sessions continues after an error with the next one; its exit code is 1 if one of them failed.
"""

import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from tokencache.adapters.load import AdapterError
from tokencache.client import ClientError, Session
from tokencache.commands.completion import SESSION, SESSIONS, complete_group, complete_harness
from tokencache.commands.console import (
    PROXY_URL,
    AdminKeyOption,
    JsonOption,
    ProxyOption,
    calling,
    failed,
    plural,
    print_json,
    said,
    warned,
)
from tokencache.commands.options import given, takes
from tokencache.commands.rewards import RewardFileError, RewardFileOption, RewardValues, read_reward
from tokencache.core.session import LabelChanges, NewFork, NewSession

_Name = Annotated[str, SESSION]
_Names = Annotated[list[str], SESSIONS]


@takes(NewSession, {"harness": complete_harness, "group": complete_group})
def create_session(
    session: Annotated[str | None, typer.Argument(metavar="SESSION", help="Name of the session. Default: a new, random one.")] = None,
    *,
    config_dir: Annotated[
        Path | None, typer.Option("--config-dir", metavar="DIR", help="Where to write the configuration of the harness, if it has files.")
    ] = None,
    as_json: JsonOption = False,
    proxy: ProxyOption = PROXY_URL,
    admin_key: AdminKeyOption = None,
    **options: Any,
) -> None:
    """Create a session and an API key for it.

    Prints the session, its base URL and its key. A harness that sends the key
    needs no other name of the session.

    tokencache create r17 --group task-4 --sampling '{"temperature": 1}'
    """
    wanted = given(NewSession, options)
    try:
        with calling(proxy, admin_key) as client, warned():
            made = client.create(session, config_dir=config_dir, **wanted)
    except AdapterError as error:
        raise failed(error) from None
    _print_access(made, as_json=as_json)


@takes(NewFork, {"group": complete_group})
def fork_session(
    session: _Name,
    turn: Annotated[str, typer.Argument(metavar="TURN", help="Id of the turn after which it begins; `tokencache show` lists them.")],
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Name of the fork. Default: a new, random one.")] = None,
    *,
    as_json: JsonOption = False,
    proxy: ProxyOption = PROXY_URL,
    admin_key: AdminKeyOption = None,
    **options: Any,
) -> None:
    """Fork a session after a turn, for another continuation.

    The fork shares the tokens up to there; its export has them with mask 0.
    Prints the same as `tokencache create`.

    tokencache fork r17 35a7c4219cf07c14 --group tree-4
    """
    with calling(proxy, admin_key) as client:
        made = client.fork(session, turn, name, **given(NewFork, options))
    _print_access(made, as_json=as_json)


def _print_access(made: Session, *, as_json: bool) -> None:
    access = {"session": made.id, "base_url": made.base_url, "key": made.key, "key_id": made.key_id}
    if as_json:
        print_json(access)
    else:
        typer.echo("\n".join(f"{name:<9} {value}" for name, value in access.items()))


def finish_sessions(  # noqa: PLR0917 - one parameter per option
    sessions: Annotated[list[str] | None, SESSIONS] = None,
    tag: Annotated[str | None, typer.Option("--tag", metavar="TAG", help="Also all open sessions with this tag.")] = None,
    reward: Annotated[float | None, typer.Option("--reward", metavar="NUMBER", help="Reward of each session.")] = None,
    reward_file: RewardFileOption = None,
    kind: Annotated[
        str | None,
        typer.Option(
            "--failed",
            metavar="KIND",
            help="What failed: engine, harness, sandbox, timeout, budget, canceled, store, or a word of your own; ok: nothing.",
        ),
    ] = None,
    detail: Annotated[str, typer.Option("--detail", metavar="TEXT", help="The failure in words.", show_default=False)] = "",
    as_json: JsonOption = False,
    proxy: ProxyOption = PROXY_URL,
    admin_key: AdminKeyOption = None,
) -> None:
    """Finish sessions: their rollouts are over.

    A finished session accepts no new calls. Calls in flight end normally.
    Finishing it again changes nothing.

    tokencache finish r17 --reward 0.5

    tokencache finish r18 --failed sandbox --detail "out of memory"

    tokencache finish --tag run:ID --failed canceled
    """
    if not sessions and tag is None:
        raise typer.BadParameter("give a SESSION or --tag")
    values = _reward_values(reward, reward_file)
    given = {} if values is None else msgspec.structs.asdict(values)
    _each(
        sessions or [], lambda session: session.finish(**given, failed=kind, detail=detail), "finished", as_json, proxy, admin_key, tag=tag
    )


def set_reward(  # noqa: PLR0917 - one parameter per option
    session: _Name,
    reward: Annotated[float | None, typer.Argument(metavar="NUMBER", help="Reward of the session.")] = None,
    reward_file: RewardFileOption = None,
    as_json: JsonOption = False,
    proxy: ProxyOption = PROXY_URL,
    admin_key: AdminKeyOption = None,
) -> None:
    """Set the reward of a session, in any state.

    It replaces the reward as a whole. Earlier ones are kept as its history.

    tokencache reward r17 0.5

    tokencache reward r17 --reward-file reward.json
    """
    values = _reward_values(reward, reward_file)
    if values is None:
        raise typer.BadParameter("give a NUMBER or --reward-file")
    _each([session], lambda one: one.set_reward(**msgspec.structs.asdict(values)), "rewarded", as_json, proxy, admin_key)


@takes(LabelChanges, {"group": complete_group})
def label_session(
    session: _Name, *, as_json: JsonOption = False, proxy: ProxyOption = PROXY_URL, admin_key: AdminKeyOption = None, **options: Any
) -> None:
    """Set the group, tags or metadata of a session, in any state.

    What is given replaces the old value as a whole. --group '' and --tag ''
    remove group and tags.

    tokencache label r17 --group task-4 --tag train --metadata '{"seed": 1}'
    """
    changes = given(LabelChanges, options)
    if "tags" in changes:
        changes["tags"] = [tag for tag in changes["tags"] if tag]
    if not changes:
        raise typer.BadParameter("give --group, --tag or --metadata")
    _each([session], lambda one: one.label(**changes), "labelled", as_json, proxy, admin_key)


def seal_sessions(
    sessions: _Names,
    force: Annotated[
        bool, typer.Option("--force", help="Also seal sessions that are not finished or have calls in flight. They become incomplete.")
    ] = False,
    as_json: JsonOption = False,
    proxy: ProxyOption = PROXY_URL,
    admin_key: AdminKeyOption = None,
) -> None:
    """Seal finished sessions: their records do not change any more.

    tokencache seal r17
    """
    _each(sessions, lambda session: session.seal(force=force), "sealed", as_json, proxy, admin_key)


def delete_sessions(  # noqa: PLR0917 - one parameter per option
    sessions: _Names,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    reuse: Annotated[bool, typer.Option("--reuse", help="Calls may create the sessions again at once.")] = False,
    as_json: JsonOption = False,
    proxy: ProxyOption = PROXY_URL,
    admin_key: AdminKeyOption = None,
) -> None:
    """Delete sessions with all their tokens. Asks first.

    Calls in flight are dropped when they end. A late call does not create a
    deleted session again, unless --reuse is given, now or later.

    tokencache delete r17 r18
    """
    if not yes:
        if not sys.stdin.isatty():
            raise failed(f"this would delete {plural(len(sessions), 'session')}: add --yes if that is what you want")
        typer.confirm(f"Delete {plural(len(sessions), 'session')}: {', '.join(sessions)}?", abort=True, err=True)
    _each(sessions, lambda session: session.delete(reuse=reuse), "deleted", as_json, proxy, admin_key)


def _each(  # noqa: PLR0917 - as the commands pass them
    names: Sequence[str],
    act: Callable[[Session], object],
    done: str,
    as_json: bool,
    proxy: str,
    admin_key: str | None,
    tag: str | None = None,
) -> None:
    """Do something with each session, and with all open ones that have the tag, and print a line or a JSON object for each."""
    results: list[dict[str, Any]] = []
    with calling(proxy, admin_key) as client:
        tagged = [] if tag is None else [state.session for state in client.sessions(tag=tag, state="open")]
        for name in dict.fromkeys([*names, *tagged]):
            try:
                act(client.session(name))
                results.append({"session": name, "done": done})
            except ClientError as error:
                results.append({"session": name, "error": said(error)})
                failed(error)
    if as_json:
        print_json(results)
    else:
        for result in results:
            if "done" in result:
                typer.echo(f"{result['session']} {done}")
    if any("error" in result for result in results):
        raise typer.Exit(1)


def _reward_values(reward: float | None, file: Path | None) -> RewardValues | None:
    if reward is not None and file is not None:
        raise typer.BadParameter("give a reward or --reward-file, not both")
    if reward is not None and not math.isfinite(reward):
        raise typer.BadParameter(f"the reward {reward} is not a finite number")
    if file is None:
        return None if reward is None else RewardValues(reward)
    try:
        return read_reward(file)
    except RewardFileError as error:
        raise failed(error) from None
