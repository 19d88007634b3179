"""Places in a request, as errors name them: `messages.3.content.0`, `input[3].content[0]`.

Of a long history thousands of places are looked at and none is named, so a place is only a pair, where it is within and which member or
entry it is there; its name is written when an error is.
"""

Place = str | tuple["Place", str | int]
"""A name (`""` for the whole request), or a member or an entry of another place."""


def dotted(place: Place) -> str:
    """Name a place as Anthropic's API does: `messages.3.content`."""
    return ".".join([str(name) for name in _names(place)])


def bracketed(place: Place) -> str:
    """Name a place as OpenAI's and Google's APIs do: `input[3].content`."""
    said = ""
    for name in _names(place):
        said += f"[{name}]" if isinstance(name, int) else f".{name}" if said else name
    return said


def _names(place: Place) -> list[str | int]:
    names: list[str | int] = []
    while isinstance(place, tuple):
        place, name = place
        names.append(name)
    return [*([place] if place else []), *reversed(names)]
