"""The command line: `tokencache serve`, `tokencache run` and what goes with it, `tokencache demo`."""

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
import uvloop
from pydantic import ValidationError
from pydantic_settings import SettingsError

from tokencache import logs
from tokencache.adapters import commands
from tokencache.commands import app as trainer
from tokencache.config import Settings
from tokencache.render.local import quieten
from tokencache.serving.server import run
from tokencache.serving.workers import WorkerError, supervise
from tokencache.store.contract import StoreError
from tokencache.trainer.drift.command import report_drift

log = logging.getLogger(__name__)
SHORT_KEY = 16
"""Characters of an admin key below which it is warned about: such a key may be guessed by trying."""

app = typer.Typer(
    help="Exact tokens for agents that only speak text: a session-aware reverse proxy in front of vLLM.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command("run")(commands.run_harness)
app.command("env")(commands.print_environment)
app.command("harnesses")(commands.list_harnesses)
app.command("sessions")(trainer.list_sessions)
app.command("show")(trainer.show_session)
app.command("export")(trainer.export_sessions)
app.command("verify")(trainer.verify_exports)
app.command("drift")(report_drift)


def main() -> None:
    """Run the command line."""
    app()


def _option(name: str) -> Any:
    field = Settings.model_fields[name]
    return typer.Option(help=field.description, envvar=f"TOKENCACHE_{name.upper()}", show_default=str(field.default))


def _said(fault: Mapping[str, Any]) -> str:
    """Say what is wrong with the settings, or with one of them."""
    return ": ".join(filter(None, (".".join(map(str, fault["loc"])), fault["msg"].removeprefix("Value error, "))))


@app.command()
def serve(  # noqa: PLR0917 - one parameter per option
    upstream: Annotated[list[str] | None, _option("upstream")] = None,
    upstream_key: Annotated[str | None, _option("upstream_key")] = None,
    engine: Annotated[str | None, _option("engine")] = None,
    require: Annotated[str | None, _option("require")] = None,
    tokenizer: Annotated[Path | None, _option("tokenizer")] = None,
    host: Annotated[str | None, _option("host")] = None,
    port: Annotated[int | None, _option("port")] = None,
    workers: Annotated[int | None, _option("workers")] = None,
    drain: Annotated[float | None, _option("drain")] = None,
    store: Annotated[str | None, _option("store")] = None,
    store_ttl: Annotated[float | None, _option("store_ttl")] = None,
    store_timeout: Annotated[float | None, _option("store_timeout")] = None,
    max_sessions: Annotated[int | None, _option("max_sessions")] = None,
    max_store_bytes: Annotated[int | None, _option("max_store_bytes")] = None,
    store_may_evict: Annotated[bool | None, _option("store_may_evict")] = None,
    on_store_error: Annotated[str | None, _option("on_store_error")] = None,
    model_aliases: Annotated[str | None, _option("model_aliases")] = None,
    sampling: Annotated[str | None, _option("sampling")] = None,
    return_token_id_information: Annotated[bool | None, _option("return_token_id_information")] = None,
    experts: Annotated[str | None, _option("experts")] = None,
    rules_off: Annotated[str | None, _option("rules_off")] = None,
    adapters: Annotated[Path | None, _option("adapters")] = None,
    hold: Annotated[float | None, _option("hold")] = None,
    whole_replies: Annotated[bool | None, _option("whole_replies")] = None,
    repeats: Annotated[str | None, _option("repeats")] = None,
    linger: Annotated[float | None, _option("linger")] = None,
    keep_alive: Annotated[float | None, _option("keep_alive")] = None,
    session_header: Annotated[str | None, _option("session_header")] = None,
    session_from: Annotated[str | None, _option("session_from")] = None,
    affinity_headers: Annotated[str | None, _option("affinity_headers")] = None,
    registered_only: Annotated[bool | None, _option("registered_only")] = None,
    max_calls: Annotated[int | None, _option("max_calls")] = None,
    max_tokens: Annotated[int | None, _option("max_tokens")] = None,
    max_seconds: Annotated[float | None, _option("max_seconds")] = None,
    admin_key: Annotated[str | None, _option("admin_key")] = None,
    allow_open: Annotated[bool | None, _option("allow_open")] = None,
    max_body: Annotated[int | None, _option("max_body")] = None,
    prefix_memory: Annotated[int | None, _option("prefix_memory")] = None,
    log_level: Annotated[str | None, _option("log_level")] = None,
) -> None:
    """Serve: point harnesses here instead of at the engine.

    Name the session with the header X-Tokencache-Session, or in the base URL (http://HOST:PORT/s/SESSION/v1), or as the
    API key tcs-SESSION. Requests without a session are relayed untouched. Take trajectories back from
    GET /tokencache/v1/sessions/SESSION/trajectories.
    """
    given = {name: value for name, value in locals().items() if value is not None}
    try:
        settings = Settings(**given)
    except ValidationError as why:
        raise typer.BadParameter("; ".join(map(_said, why.errors()))) from None
    except SettingsError as why:  # an environment variable that is no JSON
        raise typer.BadParameter(f"{why}: {why.__cause__}") from None
    logs.set_up(settings.log_level, several=settings.workers > 1)
    if settings.admin_key is not None and len(settings.admin_key) < SHORT_KEY:
        weak = "is empty: what is the trainer's is open to all" if not settings.admin_key else f"has less than {SHORT_KEY} characters"
        log.warning("THE ADMIN KEY %s; take a long random one: openssl rand -hex 32", weak)
    if settings.tokenizer is not None:
        quieten()
    try:
        uvloop.run(run(settings) if settings.workers == 1 else supervise(settings))
    except (OSError, StoreError, ValueError, WorkerError) as why:
        typer.secho(f"tokencache: {why}", fg="red", err=True)
        raise typer.Exit(1) from None


@app.command()
def demo(
    json_file: Annotated[Path | None, typer.Option("--json", help="write the figures to this file, too")] = None,
    upstream: Annotated[str | None, typer.Option(help="run the same episodes against this engine instead of a simulated one")] = None,
    model: Annotated[str, typer.Option(help="the model's name at --upstream; default: the first it serves")] = "",
    rollouts: Annotated[int, typer.Option(min=1, max=1000, help="rollouts each way")] = 16,
    turns: Annotated[int, typer.Option(min=2, max=64, help="turns of a rollout")] = 8,
) -> None:
    """Show the main job: the same agent, directly and through the proxy, on an engine that keeps its own books."""
    try:
        from tokencache.demo import run_demo  # noqa: PLC0415 - needs the extra `testing`
    except ModuleNotFoundError as why:
        typer.secho(f"the demo needs the extra 'testing' ({why.name} is missing): pip install 'tokencache[testing]'", fg="red", err=True)
        raise typer.Exit(1) from None
    logging.basicConfig(level=logging.ERROR)
    if not asyncio.run(run_demo(rollouts=rollouts, turns=turns, upstream=upstream, model=model, json_file=json_file)):
        raise typer.Exit(1)
