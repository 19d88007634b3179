"""The expected result of every kind of template in every shape, as data and as the tables of `docs/templates.md`.

`python -m tests.engine.template.table` writes the tables there; `test_templates.py` holds them against both.
"""

import asyncio
import re
from pathlib import Path
from typing import Any

from tests.engine.template.shapes import SHAPES, TOOLS, ask
from tests.engine.template.template_lab import KINDS, Kind, Lab, own_stop
from tokencache.core import ids
from tokencache.core.splice import junction
from tokencache.engine.template.learned import LearnedTemplate
from tokencache.engine.template.tails import Tails

DOC = Path(__file__).parents[3] / "docs" / "templates.md"

_LATER_SYSTEM = {
    "text → developer, user": "refused: new-messages-reach-back",
    "developer: text → system, user": "refused: new-messages-reach-back",
}
_SYSTEM_FIRST = {"text → system, user": "refused: template-refuses", "call → result, system": "refused: template-refuses"}

EXCEPTIONS: dict[str, dict[str, str]] = {
    "Qwen2.5": _LATER_SYSTEM,
    "Qwen3": _LATER_SYSTEM,
    "Qwen3-2507": _LATER_SYSTEM,
    "Qwen3.5 think": _LATER_SYSTEM | _SYSTEM_FIRST,
    "Qwen3.5 nothink": _LATER_SYSTEM | _SYSTEM_FIRST,
    "GLM-4.5": _LATER_SYSTEM
    | {
        "call → user": "small, other-stop",
        "text → system, user": "small, other-stop",
        "text → another's text, user": "small, other-stop",
    },
    "DeepSeek-V3": _LATER_SYSTEM
    | {
        "second round: call → result": "full",
        "second round: two calls → two results": "full",
        "third round: call → result": "full",
        "third question: call → result": "full",
        "text → system, user": "refused: new-messages-reach-back",
        "call → result, system": "refused: new-messages-reach-back",
    },
    "Llama-3": _LATER_SYSTEM,
    "Llama-3.1": _LATER_SYSTEM
    | {
        "two calls → two results": "refused: template-refuses",
        "three calls, two tools → three results": "refused: template-refuses",
        "second round: two calls → two results": "refused: template-refuses",
    },
    "Nemotron-3": _LATER_SYSTEM,
    "gpt-oss": {name: "small, other-stop" for name, shape in SHAPES.items() if "tool_calls" not in shape.history[-1]},
}
"""Where a kind and a shape are not `small` with a shared stop: the way, and how a reply that the model ended meets the tail."""


def expected(kind: Kind, shape: str) -> str:
    return EXCEPTIONS[kind.name].get(shape, "small")


def by_shape() -> str:
    """The table of shapes, kinds that behave alike in one column."""
    columns: dict[tuple[str, ...], list[str]] = {}
    for name, kind in KINDS.items():
        columns.setdefault(tuple(expected(kind, shape) for shape in SHAPES), []).append(name)
    rows = [["shape", *(", ".join(names) for names in columns.values())]]
    rows += [[shape, *(column[i] for column in columns)] for i, shape in enumerate(SHAPES)]
    return _markdown(rows)


async def by_kind() -> str:
    """The table of boundaries, found with the stand-ins."""
    rows = [
        ["kind", "stop ids that the probe finds", "a tail behind a text begins", "a tail behind a call begins", "the model's stop and it"]
    ]
    for kind in KINDS.values():
        lab = Lab.of(kind)
        stops = await lab.found_stops(kind.stops)
        tails = Tails(LearnedTemplate(lab, stops))
        begins, meets = [], []
        for shape in (SHAPES["text → user"], SHAPES["call → result"]):
            tail = await tails.tail(ask(shape.messages, len(shape.history), len(shape.messages), tools=shape.tools))
            begins.append(_code(lab.words.decode(ids.unpack(tail)).split(shape.new[0]["content"])[0].split('"total')[0]))
            own = ids.pack([lab.words.id_of(own_stop(kind, shape.history[-1]))])
            meets.append(junction(own, tail, stops).kind)
        met = meets[0] if meets[0] == meets[1] else f"text: {meets[0]}; call: {meets[1]}"
        rows.append([kind.name, ", ".join(_code(lab.words.decode([stop])) for stop in sorted(stops)), *begins, met])
    return _markdown(rows)


def _code(text: str) -> str:
    return "`" + text.replace("\n", "⏎").replace("|", "\\|") + "`"


def _markdown(rows: list[list[Any]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


async def written(text: str) -> str:
    """The text of the document with its tables made anew."""
    for name, table in (("kinds", await by_kind()), ("shapes", by_shape())):
        text = re.sub(rf"(<!-- {name} -->\n).*?(\n<!-- /{name} -->)", lambda m, t=table: m[1] + t + m[2], text, flags=re.DOTALL)
    return text


if __name__ == "__main__":
    DOC.write_text(asyncio.run(written(DOC.read_text("utf-8"))), "utf-8")

__all__ = ["DOC", "EXCEPTIONS", "TOOLS", "by_kind", "by_shape", "expected", "written"]
