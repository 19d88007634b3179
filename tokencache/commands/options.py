"""Makes the options of a command from the struct of a request, so that the command, the client and the API share one definition.

A field that is annotated with `msgspec.Meta` becomes an option: its description is the help, and its bounds are checked. `extra` may hold
what only a command needs: the name of the `option`, and the `metavar` of its value. A value that is neither text, a number, a flag nor a
list of texts is written as JSON.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeVar, cast

import msgspec
import typer
from msgspec import inspect as types

Command = TypeVar("Command", bound=Callable[..., None])


def takes(kind: type[msgspec.Struct], completions: Mapping[str, Callable[..., list[str]]] = {}) -> Callable[[Command], Command]:
    """Give a command, in place of its `**options`, an option for each field that it has no parameter for.

    `completions` complete the values of fields, by name.
    """

    def add(command: Command) -> Command:
        signature = inspect.signature(command)
        own = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
        made = [_parameter(field, completions.get(field.name)) for field in _fields(kind) if field.name not in signature.parameters]
        optional = [one for one in own if one.kind is inspect.Parameter.KEYWORD_ONLY and one.default is not inspect.Parameter.empty]
        first = [one for one in own if one not in optional]
        cast("Any", command).__signature__ = signature.replace(parameters=[*first, *made, *optional])
        return command

    return add


def given(kind: type[msgspec.Struct], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the options that a user gave, by the names of the fields.

    Raises:
        typer.BadParameter: a number is not finite, or a value that is written as JSON cannot be read.
    """
    fields = {field.name: field for field in _fields(kind)}
    return {name: _value(fields[name], value) for name, value in options.items() if value is not None and name in fields}


def _fields(kind: type[msgspec.Struct]) -> list[types.Field]:
    described = types.type_info(kind)
    assert isinstance(described, types.StructType)  # noqa: S101 - a struct
    return [field for field in described.fields if _described(field) is not None]


def _described(field: types.Field) -> types.Metadata | None:
    """Return the description of a field, or of the type that it has if it is given."""
    kinds = field.type.types if isinstance(field.type, types.UnionType) else (field.type,)
    return next((one for one in kinds if isinstance(one, types.Metadata)), None)


def _metadata(field: types.Field) -> types.Metadata:
    return cast("types.Metadata", _described(field))


def _option(field: types.Field) -> str:
    return cast("str", (_metadata(field).extra or {}).get("option", f"--{field.name.replace('_', '-')}"))


def _value_type(field: types.Field) -> types.Type:
    """Return the type of a field without `None`."""
    inner = _metadata(field).type
    kinds = inner.types if isinstance(inner, types.UnionType) else (inner,)
    return next(one for one in kinds if not isinstance(one, types.NoneType))


def _parameter(field: types.Field, complete: Callable[..., list[str]] | None) -> inspect.Parameter:
    described, of = _metadata(field), _value_type(field)
    bounds: dict[str, Any] = {}
    kind: Any
    match of:
        case types.BoolType():
            kind, metavar = bool, None
        case types.IntType():
            kind, metavar, bounds = int, "N", {"min": of.ge, "max": of.le}
        case types.FloatType():
            kind, metavar = float, "SECONDS"
        case types.StrType():
            kind, metavar = str, field.name.upper()
        case types.LiteralType():
            kind, metavar = Literal[tuple(value for value in of.values if value)], None
        case types.VarTupleType():
            kind, metavar = list[str], field.name.upper()
        case _:
            kind, metavar = str, "JSON"
    default = field.default if isinstance(field.default, int) else None
    option = typer.Option(
        _option(field),
        help=(described.extra_json_schema or {}).get("description", ""),
        metavar=(described.extra or {}).get("metavar", metavar),
        show_default=default is not None and kind is not bool,
        autocompletion=complete,
        **bounds,
    )
    annotation = kind if default is not None else kind | None
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[annotation, option])


def _value(field: types.Field, value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        raise typer.BadParameter(f"{_option(field)}: {value} is not a finite number")
    if isinstance(_value_type(field), (types.DictType, types.StructType)):
        try:
            return msgspec.json.decode(value, type=dict[str, Any])
        except ValueError as error:
            raise typer.BadParameter(f"{_option(field)}: expected a JSON object: {error}") from None
    return value
