"""`tokencache queue`: shows the queue of finished sessions."""

import typer

from tokencache.commands.console import PROXY_URL, AdminKeyOption, JsonOption, ProxyOption, calling, plural, print_json, printable


def show_queue(as_json: JsonOption = False, proxy: ProxyOption = PROXY_URL, admin_key: AdminKeyOption = None) -> None:
    """Show the queue, and what its groups wait for.

    A group has the size that a consumer asked for last.

    tokencache queue
    """
    with calling(proxy, admin_key) as client:
        state = client.queue()
    if as_json:
        print_json(state)
        return
    invalid = f" ({state.invalid} not valid)" if state.invalid else ""
    typer.echo(f"{plural(state.candidates, 'finished session')}{invalid}, {state.ready} ready, {state.taken} taken")
    for consumer, taken in sorted(state.consumers.items()):
        typer.echo(f"{printable(consumer)} has {plural(taken, 'session')}")
    for group in state.groups:
        typer.echo(printable(str(group)))
