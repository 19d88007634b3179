"""The command line: `tokencache serve` and the commands that work with a running proxy. `Settings` defines the options of `serve`."""

import asyncio
import inspect
import logging
import textwrap
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args, get_origin

import typer
import uvloop
from pydantic.fields import FieldInfo
from typer.core import TyperCommand

from tokencache import __version__, logs
from tokencache.adapters.load import AdapterError
from tokencache.commands.audit import audit_exports
from tokencache.commands.convert import convert_file
from tokencache.commands.drift import report_drift
from tokencache.commands.export import export_sessions
from tokencache.commands.harness import list_harnesses, print_environment, run_harness
from tokencache.commands.lifecycle import (
    create_session,
    delete_sessions,
    finish_sessions,
    fork_session,
    label_session,
    seal_sessions,
    set_reward,
)
from tokencache.commands.media import export_media
from tokencache.commands.queue import show_queue
from tokencache.commands.report import report_run
from tokencache.commands.score import score_rollouts
from tokencache.commands.sessions import list_sessions
from tokencache.commands.show import show_session
from tokencache.commands.verify import verify_exports
from tokencache.commands.weights import weights_app
from tokencache.config import NAMES, PREFIX, Settings, SettingsError, Shown, misspelled_variables, option_of
from tokencache.engine.template.local import quieten
from tokencache.errors import extra_missing
from tokencache.server.dry_run import rehearse
from tokencache.server.serve import run
from tokencache.server.workers import WorkerError, supervise
from tokencache.store.base import StoreError

log = logging.getLogger(__name__)
SHORT_KEY = 16
"""A shorter admin key causes a warning: it may be guessed."""

_BASIC, _ADVANCED = "Basic options", "Advanced options"
_OPTION_COLUMN = 22
"""Characters for the names of options in `serve --help`. Longer names get a line of their own."""

app = typer.Typer(
    help="Exact tokens for agents that only speak text: a session-aware reverse proxy in front of vLLM.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # Rich would read "[user:password@]" as markup, and its tables leave half a terminal's width for help
    context_settings={"help_option_names": ["-h", "--help"]},
)


class ServeCommand(TyperCommand):
    """`tokencache serve`, with its options grouped under headings in `--help`."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options of each panel as a list. Lines do not break at hyphens, so that names and paths can be copied."""
        width = formatter.width - _OPTION_COLUMN - 4
        panels: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                names, help_text = record
                panel = getattr(param, "rich_help_panel", None) or "Other options"
                lines = textwrap.wrap(help_text, width, break_on_hyphens=False, break_long_words=False)
                panels.setdefault(panel, []).append((names.partition(" / ")[0], "\n".join(("\b", *lines))))
        for panel, rows in panels.items():
            with formatter.section(panel):
                formatter.write_dl(rows, col_max=_OPTION_COLUMN)


def _parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    """Make the option of a setting. Values stay text: the settings check them, wherever they are given."""
    shown = next((mark for mark in field.metadata if isinstance(mark, Shown)), Shown())
    choices = (
        get_args(field.annotation) if get_origin(field.annotation) is Literal else shown.value.split("|") if "|" in shown.value else ()
    )
    kind: Any = bool if field.annotation is bool else list[str] if NAMES in field.metadata else str
    metavars = {int: "N", float: "SECONDS"}
    default = f" [default: {field.default:g}]" if isinstance(field.default, float) else f" [default: {field.default}]"
    option = typer.Option(
        f"{option_of(name)}/--no-{option_of(name)[2:]}" if kind is bool else option_of(name),
        help=" ".join((field.description or "").split()) + (default if field.default else ""),
        metavar=None if kind is bool else shown.value or "|".join(choices) or metavars.get(cast("Any", field.annotation), "JSON"),
        rich_help_panel=_BASIC if shown.basic else _ADVANCED,
        autocompletion=(lambda: list(choices)) if choices else None,
    )
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option])


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tokencache {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)] = False,
) -> None:
    """Handle the options that belong to no command."""


_Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        envvar=f"{PREFIX}CONFIG",
        metavar="FILE",
        help="TOML file with settings, named as the options are: port = 8100.",
        rich_help_panel=_BASIC,
    ),
]


_DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Print what would be started and what the probe of the engines finds, and exit: with 0, or the error that a start would give.",
    ),
]


def serve(*, config: _Config = None, dry_run: _DryRun = False, **options: Any) -> None:
    """Start the proxy. Point harnesses at it instead of at the engine.

    Name the session in the header X-Tokencache-Session, in the base URL
    (http://HOST:PORT/s/SESSION/v1) or as the API key tcs-SESSION. Requests
    without a session are relayed and not recorded. Fetch trajectories from
    /tokencache/v1/sessions/SESSION/trajectories.

    Every option is also an environment variable (--store-ttl:
    TOKENCACHE_STORE_TTL) and a key of the --config file (store_ttl). The
    command line wins over the environment, the environment over the file.
    Flags have an opposite: --no-allow-open.

    tokencache serve --upstream http://127.0.0.1:8000
    """
    try:
        settings = Settings.load({name: value for name, value in options.items() if value is not None}, config)
    except SettingsError as why:
        raise typer.BadParameter(str(why).replace("\n", "\n  ")) from None
    logs.set_up(settings.log_level, settings.log_format, several=settings.workers > 1)
    for variable, nearest in misspelled_variables().items():
        log.warning("%s IS NOT A SETTING and has no effect. Did you mean %s?", variable, nearest)
    if settings.admin_key is not None and len(settings.admin_key) < SHORT_KEY:
        weak = "is empty, so the trainer's routes are public" if not settings.admin_key else f"has less than {SHORT_KEY} characters"
        log.warning("THE ADMIN KEY %s. Use a long random one: openssl rand -hex 32", weak)
    if settings.tokenizer is not None:
        quieten()
    try:
        if dry_run:
            typer.echo("\n".join(uvloop.run(rehearse(settings))))
        else:
            uvloop.run(run(settings) if settings.workers == 1 else supervise(settings))
    except (AdapterError, OSError, StoreError, ValueError, WorkerError) as why:
        typer.secho(f"tokencache: {why}", fg="red", err=True)
        raise typer.Exit(1) from None


_signature = inspect.signature(serve)
_fixed = [one for one in _signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
_generated = [_parameter(name, field) for name, field in Settings.model_fields.items()]
cast("Any", serve).__signature__ = _signature.replace(parameters=[*_fixed, *_generated])
app.command(cls=ServeCommand)(serve)
app.command("run")(run_harness)
app.command("env")(print_environment)
app.command("harnesses")(list_harnesses)
app.command("create")(create_session)
app.command("fork")(fork_session)
app.command("finish")(finish_sessions)
app.command("reward")(set_reward)
app.command("label")(label_session)
app.command("seal")(seal_sessions)
app.command("delete")(delete_sessions)
app.command("sessions")(list_sessions)
app.command("queue")(show_queue)
app.command("report")(report_run)
app.command("show")(show_session)
app.command("export")(export_sessions)
app.command("media")(export_media)
app.command("convert")(convert_file)
app.command("verify")(verify_exports)
app.command("score")(score_rollouts)
app.command("audit")(audit_exports)
app.command("drift")(report_drift)
app.add_typer(weights_app, name="weights")


@app.command()
def demo(
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the figures to this file.")] = None,
    upstream: Annotated[str | None, typer.Option(help="Run the same episodes against this engine instead of a simulated one.")] = None,
    model: Annotated[str, typer.Option(help="Model at --upstream. The default is the first that it serves.")] = "",
    rollouts: Annotated[int, typer.Option(min=1, max=1000, help="Number of rollouts, with and without the proxy.")] = 16,
    turns: Annotated[int, typer.Option(min=2, max=64, help="Number of turns of a rollout.")] = 8,
) -> None:
    """Run an agent with and without the proxy, and compare tokens.

    The simulated engine records every call. The demo compares exports with
    that record.
    """
    try:
        from tokencache.demo import run_demo  # noqa: PLC0415 - needs the extra `testing`
    except ModuleNotFoundError as why:
        typer.secho(extra_missing("the demo", "testing", why.name), fg="red", err=True)
        raise typer.Exit(1) from None
    logging.basicConfig(level=logging.ERROR)
    if not asyncio.run(run_demo(rollouts=rollouts, turns=turns, upstream=upstream, model=model, json_file=json_file)):
        raise typer.Exit(1)


def main() -> None:
    """Run the command line."""
    app()
