"""`tokencache convert`: writes a file of native rollouts in another format, without a proxy."""

from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from tokencache.commands import files
from tokencache.commands.completion import complete_format
from tokencache.commands.console import BlockSizeOption, failed, plural
from tokencache.commands.sink import FileError, part_of
from tokencache.errors import HarnessError
from tokencache.trajectories.digest import digest_of, recorded_digest
from tokencache.trajectories.formats.reading import has_text, read_native
from tokencache.trajectories.formats.registry import FILE_FORMATS, Format, TraceFormat, file_format_named, write


def convert_file(
    source: Annotated[Path, typer.Argument(metavar="FILE", help="Native export: .jsonl, .jsonl.gz, .parquet or .json.")],
    to: Annotated[str, typer.Option("--to", metavar="FILE", help="FILE.jsonl, FILE.jsonl.gz or FILE.parquet; - is standard output.")] = "-",
    format_name: Annotated[
        str, typer.Option("--format", metavar="FORMAT", help=f"One of: {', '.join(FILE_FORMATS)}.", autocompletion=complete_format)
    ] = "native",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it exists.")] = False,
    block_size: BlockSizeOption = None,
) -> None:
    """Convert a native export to another format, without a proxy.

    The result is what `tokencache export --format` would have written. The
    formats that hold messages need an export with text: `tokencache export
    --text`.

    tokencache convert rollouts.jsonl --format verl --to verl.jsonl
    """
    part = part_of(Path(to)) if Path(to).name else None  # what has no name is refused below
    if part is not None and source.exists() and part.exists() and source.samefile(part):
        raise failed(f"{source} would be overwritten, because {to} has this name until it is complete: choose another name")
    try:
        wanted = file_format_named(format_name)
        sink = files.create(to, wanted, overwrite=overwrite, block_size=block_size)
    except (FileError, HarnessError, OSError) as error:
        raise failed(error) from None
    rollouts = 0
    try:
        for place, value in files.read(source):
            sink.write(_converted(value, wanted, f"{source}, number {place}"))
            rollouts += 1
        sink.finish()
    except BaseException as error:  # also KeyboardInterrupt
        with suppress(OSError):  # a disk that is full has no room for the end of the file either
            sink.leave()
        if part is not None and to != "-":
            part.unlink(missing_ok=True)
        if isinstance(error, FileError | OSError):
            raise failed(error) from None
        raise
    typer.echo(f"{plural(rollouts, 'rollout')}: {plural(sink.rows, 'row')} of format {wanted.name} in {to}", err=True)


def _converted(value: Any, wanted: Format | TraceFormat, where: str) -> bytes:
    try:
        rollout = read_native(value)
    except ValueError as error:
        raise FileError(f"{where}: not a native rollout: {error}") from None
    recorded = recorded_digest(value)
    if recorded is not None and recorded != digest_of(value):
        raise FileError(f"{where} (session {rollout.session}) was changed after it was exported; see `tokencache verify`")
    if isinstance(wanted, TraceFormat) or wanted.name == "native":
        return msgspec.json.encode(value)
    if wanted.reads_contexts and not has_text(value):
        raise FileError(f"{where}: format {wanted.name} holds messages, and this export has none: write it with `tokencache export --text`")
    return write(rollout, wanted)
