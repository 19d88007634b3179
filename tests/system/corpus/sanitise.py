"""Sanitises a request: replaces what the harness's makers wrote, and who sent it.

Every text in a request has an owner:

=========  ====================================================================  =======================================
makers     system prompts, descriptions, reminders, everything in users' turns   a stand-in, except what the task's user
                                                                                 asked and what the model wrote before
model      its turns, as the harness sends them back                             not changed
task       results of tools                                                      words of the task stay, others get
                                                                                 stand-ins, and so do digits near them
structure  names of tools and members, types, ids, settings                      stays; identities are replaced
=========  ====================================================================  =======================================

A text under a name that is not listed here is structure if it is short, and else the makers'. An image stays byte for byte: it
is one of the task's own, perhaps scaled by the harness.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from tests.system.corpus.standins import StandIns
from tokencache.core.media import decode_base64

RUN = 40
"""This many characters in a row would be a quotation."""
ROOM = r"/tmp/tokencache-lab(?:/[\w.-]*)*"  # noqa: S108 - nothing is opened there
"""Where the harness tests work: the same path everywhere."""
KEY_IN_JSON = r'"\w{1,30}"(?=\s*:)'
TEXTS = {"text", "content", "description", "title", "instructions", "system", "definition", "output", "input", "summary", "result"}
EXACT = {"enum", "required", "const", "pattern", "format", "default", "type", "name", "role", "model", "$schema", "syntax"}
_MODEL_ROLES = {"assistant", "model"}
_MODEL_TYPES = {"function_call", "custom_tool_call", "reasoning", "tool_use", "thinking"}
_ARGUMENTS = {"arguments", "args", "input"}
_TASK_TYPES = {"tool_result", "function_call_output", "custom_tool_call_output"}
_IDENTITY = re.compile(
    r"(?<![0-9A-Za-z])(?:[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{16,}|[0-9A-Za-z]{20,}|\d{13})(?![0-9A-Za-z])"
)
_WORD = re.compile(r"[A-Za-z]+")
_COMMON = frozenset({"null", "true", "false", "id", "type", "function", "name", "arguments"})
"""Words of JSON, and of calls written as text."""
_PROMPT = re.compile(r"EPISODE:[^\n\"<]*")
"""How a task begins in the harness tests."""
_SHORTEST_QUOTE = 12
_LABELS = frozenset({"Attached media from tool result:", "Image read successfully", "Current screenshot:"})
"""Short texts that a harness puts beside an image in a user's turn."""
_IMAGES = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF8", b"RIFF")
"""The first bytes of PNG, JPEG, GIF and WebP."""


def strings_in(value: Any) -> Iterator[str]:
    """Every text in a JSON value, except names of members."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from strings_in(inner)


def image_in(text: str) -> bytes | None:
    """The bytes of the image that a text is: base64, alone or in a data URI."""
    head, comma, data = text.partition(";base64,")
    content = decode_base64(data if comma and head.startswith("data:") else text)
    return content if content is not None and content.startswith(_IMAGES) else None


def asked_in(bodies: Iterable[dict[str, Any]]) -> list[str]:
    """What the task's user asked: the prompt that names an episode, and short texts of users without markup."""
    found: dict[str, None] = {}
    for text in (text for body in bodies for text in _of_users(body, user=False)):
        prompts = _PROMPT.findall(text)
        short = len(text) < RUN and text.strip() and "\n" not in text and text[0] not in "<[" and text not in _LABELS
        found.update(dict.fromkeys(prompts or ([text] if short else [])))
    return list(found)


def _of_users(value: Any, *, user: bool) -> Iterator[str]:
    """The texts in users' turns, except results of tools."""
    if isinstance(value, list):
        for inner in value:
            yield from _of_users(inner, user=user)
    elif isinstance(value, dict):
        user = value["role"] == "user" if isinstance(value.get("role"), str) else user
        if value.get("type") not in _TASK_TYPES and "functionResponse" not in value:
            for key in (key for key in value if key in {"content", "text", "parts", "messages", "input", "contents"}):
                yield from _of_users(value[key], user=user)
    elif isinstance(value, str) and user:
        yield value


class Sanitiser:
    """Sanitises the requests of one recording.

    `key` determines the stand-ins. `asked` is what the task's user asked, `said` what the model wrote (texts, thoughts and the strings in
    its
    calls), `served` the ids and handles in its replies.
    """

    def __init__(self, key: bytes, asked: Sequence[str], said: Iterable[str], served: Iterable[str]) -> None:
        said = [text for text in said if text]
        lines = {line.strip() for text in said for line in text.splitlines()}
        quoted = [*asked, *(line for line in lines if len(line) >= _SHORTEST_QUOTE)]
        self.makers = StandIns(key, quoted, [ROOM])
        self.task = StandIns(key, quoted, [ROOM, KEY_IN_JSON])
        self._said = "\0".join(said)
        self._words = _COMMON | {word.lower() for text in [*asked, *said] for word in _WORD.findall(text)}
        self._served = {identity for one in served for identity in [one, *_IDENTITY.findall(one)]}

    @property
    def originals(self) -> set[str]:
        """Everything that was replaced."""
        return self.makers.originals | self.task.originals

    def body(self, body: dict[str, Any]) -> dict[str, Any]:
        """Sanitises a request's body."""
        return {key: self._member(key, value, "makers") for key, value in body.items()}

    def header(self, value: str) -> str:
        """Sanitises a header's value: in a list of products (`codex/1.0 (Debian; x86_64)`) the parts in brackets are omitted."""
        return self._structure(re.sub(r"\s*\([^)]*\)", "", value))

    def _member(self, key: str, value: Any, owner: str) -> Any:
        if (key in EXACT and not isinstance(value, dict)) or (owner == "model" and key in _ARGUMENTS):
            return value
        if isinstance(value, dict):
            return self._object(value, owner)
        if isinstance(value, list):
            return [self._member(key, inner, owner) for inner in value]
        return self._string(key, value, owner) if isinstance(value, str) else value

    def _string(self, key: str, value: str, owner: str) -> str:
        if image_in(value) is not None:
            return value
        if owner == "model" and key not in {"id", "call_id"}:
            return self._models(value)
        if key in TEXTS or len(value) >= RUN:
            return self._text(value, owner)
        return self._structure(value)

    def _object(self, value: dict[str, Any], owner: str) -> dict[str, Any]:
        kind, role = (one if isinstance(one := value.get(member), str) else "" for member in ("type", "role"))
        if kind in _TASK_TYPES or role in {"tool", "function"}:
            owner = "task"
        elif kind in _MODEL_TYPES or role in _MODEL_ROLES:
            owner = "model"
        elif role:
            owner = "makers"
        inner = {"functionCall": "model", "functionResponse": "task"}
        return {key: self._member(key, member, inner.get(key, owner)) for key, member in value.items()}

    def _text(self, value: str, owner: str) -> str:
        if owner != "task" and self._is_record(value):
            return self._structure(value)
        return self.task.text(value, self._words) if owner == "task" else self.makers.text(value)

    def _models(self, value: str) -> str:
        """The model's turn as it was sent back; long text that a harness added to it is the makers'."""
        if value in self._served or value.strip() in self._said:
            return value
        own = [(0, 0), *(word.span() for word in _WORD.finditer(value) if word[0].lower() in self._words), (len(value), 0)]
        strange = [value[before[1] : after[0]] for before, after in pairwise(own)]
        quotes = any(len(text) >= RUN and sum(map(str.isalpha, text)) >= RUN / 2 for text in strange)
        return self.makers.text(value) if quotes else value

    def _structure(self, value: str) -> str:
        return _IDENTITY.sub(lambda found: found[0] if found[0] in self._served else self._opaque(found[0]), value)

    def _opaque(self, text: str) -> str:
        """Replaces an identity; long words without a digit are none, and a time becomes zero."""
        if text.isdigit():
            return "0" * len(text)
        return self.makers.opaque(text) if any(character.isdigit() for character in text) else text

    @staticmethod
    def _is_record(value: str) -> bool:
        """Whether a text is an object of short strings and numbers, a form in which identities are sent."""
        try:
            found = json.loads(value) if value.startswith("{") else None
        except ValueError:
            return False
        return found is not None and all(not isinstance(inner, dict | list) and " " not in str(inner) for inner in found.values())
