"""Identifies images, video and audio in messages by their content, so that an image is the same however a harness writes it.

An agent sends an image again with every call, and not always in the same bytes: a library may wrap base64 text, leave out the padding, or
add a parameter to a data URI. A digest of the URL would then see another image, and the conversation would not continue. So a media part
is identified by these values:

==============  =====================================================================================================
modality        `image`, `video` or `audio`
content         the SHA-256 of the decoded bytes of a data URI or of inline audio; for any other URL the URL itself, because its content is
                unknown until it is fetched
media type      for video and audio only, whose decoders depend on it. vLLM 0.32 recognizes images by their bytes
                (`vllm/multimodal/media/image.py`, `ImageMediaIO.load_base64`)
other members   all others as they are written, such as `uuid`: vLLM 0.32 trusts it, and may use another image. `detail` too, except `auto`,
                which is the default
==============  =====================================================================================================

An image that was encoded again, scaled, or requested with another detail is another image: the engine computes other embeddings for it.
Parts of unknown kinds equal only parts that are written alike.
"""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

_KEY = "\x00media"
"""The only member of an identity. No part that a harness can write becomes equal to an identity, because every part that is not text is
replaced by one."""
_SPACE = b" \t\n\f\r"
"""White space that base64 text may contain (WHATWG, Infra Standard, "forgiving-base64 decode")."""
Modality = Literal["image", "video", "audio"]
_MODALITIES: Mapping[str, Modality] = {"image_url": "image", "video_url": "video", "audio_url": "audio"}


class PlacedMedia(msgspec.Struct, frozen=True):
    """An image, video or audio in a prompt, and the tokens that stand for it.

    Attributes:
        modality: `image`, `video` or `audio`.
        sha256: hexadecimal SHA-256 of the decoded bytes; `""` if the harness sent a URL that was not fetched.
        media_type: its declared MIME type, such as `image/png`; `""` if none was declared.
        start, length: its tokens: `length` tokens from index `start` of the prompt or sequence on. All placeholder tokens count, as the
            engine uses them.
    """

    modality: str
    sha256: str
    media_type: str
    start: int
    length: int

    @property
    def end(self) -> int:
        """The index after its last token."""
        return self.start + self.length

    def is_same(self, other: "PlacedMedia") -> bool:
        """Whether both are the same medium in the same place. The declared MIME type may differ."""
        return (self.modality, self.sha256, self.start, self.length) == (other.modality, other.sha256, other.start, other.length)


class MediaPart(msgspec.Struct, frozen=True):
    """A content part of a message that is not text.

    Attributes:
        modality: `image`, `video` or `audio`; `""` for a part of unknown kind.
        sha256: hexadecimal SHA-256 of the decoded bytes; `""` if they are not in the message.
        media_type: the declared MIME type; `""` if none is declared.
        trusted: whether the engine can use nothing but these bytes: they are in the message, and it has no `uuid`.
        known: whether the engine takes parts of this type. If not, the part may be anything.
    """

    modality: str = ""
    sha256: str = ""
    media_type: str = ""
    trusted: bool = False
    known: bool = True


Places = Mapping[str, Sequence[tuple[int, int]]]
"""Modality → first token and number of tokens of each placeholder in a prompt, in order."""


class PlacesDifferError(ValueError):
    """The placeholders in a prompt are not those of the media in its messages."""


def place_media(parts: Sequence[MediaPart], places: Places, prompt_tokens: int) -> tuple[PlacedMedia, ...]:
    """Join the media of all messages of a prompt, in order, with the placeholders that the engine reports.

    Raises:
        PlacesDifferError: their numbers differ, or the placeholders overlap or end beyond the prompt.
    """
    waiting = {modality: iter(listed) for modality, listed in places.items()}
    found: list[PlacedMedia] = []
    for part in parts:
        start, length = next(waiting.get(part.modality, iter(())), (0, 0))
        if length <= 0:
            raise PlacesDifferError(f"the messages have more media ({part.modality or 'unknown'}) than the engine placed")
        found.append(PlacedMedia(part.modality, part.sha256, part.media_type, start, length))
    if any(next(rest, None) is not None for rest in waiting.values()):
        raise PlacesDifferError("the engine placed more media than the messages have")
    found.sort(key=lambda medium: medium.start)
    ends = [0, *(medium.end for medium in found)]
    if any(medium.start < end for medium, end in zip(found, ends, strict=False)) or ends[-1] > prompt_tokens:
        raise PlacesDifferError("the placeholders overlap, or end beyond the prompt")
    return tuple(found)


class StoredMedium(msgspec.Struct, frozen=True):
    """An image, video or audio that a store has the bytes of.

    Attributes:
        sha256: hexadecimal SHA-256 of the bytes.
        media_type: the MIME type that the harness declared; `""` if it declared none.
        bytes: their number.
    """

    sha256: str
    media_type: str
    bytes: int


_ENDINGS: Mapping[str, str] = {
    "image/png": ".png",
    "image/jpeg": ".jpg",
    "image/gif": ".gif",
    "image/webp": ".webp",
    "image/bmp": ".bmp",
    "audio/wav": ".wav",
    "audio/mpeg": ".mp3",
    "audio/ogg": ".ogg",
    "audio/flac": ".flac",
    "video/mp4": ".mp4",
    "video/webm": ".webm",
}


def file_name(sha256: str, media_type: str) -> str:
    """Return the name of the file of a medium: its digest, and an ending that its media type selects (`.bin` for unknown types)."""
    return sha256 + _ENDINGS.get(media_type, ".bin")


def media_identity(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON value that is equal for all ways to write one image, video or audio, and different for any other.

    Args:
        part: a decoded content part of a chat message that is not text.
    """
    written = {name: value for name, value in part.items() if name != "cache_control"}
    found = _source(written)
    return {_KEY: {"part": written} if found is None else found}


def _source(part: dict[str, Any]) -> dict[str, Any] | None:
    """Return the identity of a part of a known kind; `None` for any other part."""
    kind = part.get("type")
    if not isinstance(kind, str):
        return None
    rest = {name: value for name, value in part.items() if value is not None and name not in {"type", kind}}
    named = part.get(kind)
    match {"url": named} if isinstance(named, str) else named:
        case {"url": str(url), **members} if kind in _MODALITIES:
            inner = {name: value for name, value in members.items() if (name, value) != ("detail", "auto") and value is not None}
            return {"modality": _MODALITIES[kind], "members": inner, "other": rest, **_content_of(url, _MODALITIES[kind])}
        case {"data": str(data), **members} if kind == "input_audio" and (content := decode_base64(data)) is not None:
            return {"modality": "audio", "members": members, "other": rest, "sha256": hashlib.sha256(content).hexdigest()}
        case _:
            return None


def _content_of(url: str, modality: str) -> dict[str, str]:
    head, comma, data = url.partition(",") if url[:5].lower() == "data:" else ("", "", "")
    declared, _, encoding = head[5:].rpartition(";")
    content = decode_base64(data) if comma and encoding.strip().lower() == "base64" else None
    if content is None:
        return {"url": url}
    kind = {} if modality == "image" else {"media_type": declared.partition(";")[0].strip().lower()}
    return {"sha256": hashlib.sha256(content).hexdigest(), **kind}


def media_part(part: Mapping[str, Any], identity: Mapping[str, Any], *, known: bool = True) -> MediaPart:
    """Describe a decoded content part that is not text; `identity` is its identity, `known` whether the engine takes its type."""
    found = identity[_KEY]
    if "modality" not in found:
        return MediaPart(known=known)
    url = media_url(part)
    declared = url[5:].partition(",")[0].partition(";")[0].strip().lower() if url[:5].lower() == "data:" else ""
    sha256 = found.get("sha256", "")
    named = {*found["members"], *found["other"]}
    return MediaPart(found["modality"], sha256, declared, bool(sha256) and "uuid" not in named)


def media_url(part: Mapping[str, Any]) -> str:
    """Return the URL of a part with a URL, whichever way it is written; `""` if it has none."""
    kind = part.get("type")
    named = part.get(kind) if isinstance(kind, str) else None
    url = named.get("url") if isinstance(named, dict) else named
    return url if isinstance(url, str) else ""


REFERENCE = "media:"
"""Begins the reference that a stored message has in place of the bytes of a medium; their hexadecimal SHA-256 follows."""
_LONG = 1024
"""Characters. Longer texts in parts of unknown kinds are replaced by a reference too."""


def as_reference(part: Mapping[str, Any], described: MediaPart) -> dict[str, Any]:
    """Replace the bytes in a decoded content part by a reference."""
    if not described.modality:
        return {name: _shortened(value) for name, value in part.items()}
    if not described.sha256:
        return dict(part)
    reference, kind = REFERENCE + described.sha256, part["type"]
    named = part[kind]
    if isinstance(named, str):
        return {**part, kind: reference}
    return {**part, kind: {**named, "data" if "data" in named else "url": reference}}


class MediaReference(NamedTuple):
    """A part of a stored message that is not text: its modality (`""` if it is unknown), and the SHA-256 of its bytes (`""` for a URL)."""

    modality: str
    sha256: str


def references_in(message: Mapping[str, Any]) -> list[MediaReference]:
    """Return the parts of a decoded stored message that are not text, in order."""
    content = message.get("content")
    parts = content if isinstance(content, list) else ()
    return [_reference(part) for part in parts if isinstance(part, dict) and part.get("type") != "text"]


def _reference(part: Mapping[str, Any]) -> MediaReference:
    kind = part.get("type")
    named = part.get(kind) if isinstance(kind, str) else None
    stored = named.get("data") if kind == "input_audio" and isinstance(named, dict) else media_url(part)
    modality = "audio" if kind == "input_audio" else _MODALITIES.get(kind, "") if isinstance(kind, str) else ""
    if not modality or not isinstance(stored, str) or not stored.startswith(REFERENCE):
        return MediaReference(modality, "")
    return MediaReference(modality, stored.removeprefix(REFERENCE))


def _shortened(value: Any) -> Any:
    match value:
        case str() if len(value) > _LONG:
            return REFERENCE + hashlib.sha256(value.encode("utf-8", "surrogatepass")).hexdigest()
        case dict():
            return {name: _shortened(inner) for name, inner in value.items()}
        case list():
            return [_shortened(inner) for inner in value]
        case _:
            return value


def media_content(part: Mapping[str, Any]) -> bytes | None:
    """Decode the bytes of a medium that are in a content part; `None` if they are not."""
    kind = part.get("type")
    named = part.get(kind) if isinstance(kind, str) else None
    if kind == "input_audio" and isinstance(named, dict) and isinstance(named.get("data"), str):
        return decode_base64(named["data"])
    url = media_url(part)
    head, comma, data = url.partition(",") if url[:5].lower() == "data:" else ("", "", "")
    return decode_base64(data) if comma and head.lower().rstrip().endswith("base64") else None


def decode_base64(text: str) -> bytes | None:
    """Decode standard base64 text; white space and missing padding are accepted. `None` if it is not base64."""
    try:
        plain = text.encode("ascii").translate(None, _SPACE)
        return base64.b64decode(plain + b"=" * (-len(plain) % 4), validate=True)
    except ValueError:  # also UnicodeEncodeError and binascii.Error
        return None


class ImageReference(NamedTuple):
    """An image in a stored message; `sha256` is the hexadecimal SHA-256 of its bytes."""

    sha256: str


def texts_and_images(parts: bytes) -> list[str | ImageReference] | None:
    """Read the parts of a stored message: its texts and images, in order.

    Args:
        parts: `Message.media` of the message as it was read from its record, which has references in place of bytes.

    Returns:
        `None` if it has other parts, or an image by URL whose bytes are not known.
    """
    found: list[str | ImageReference] = []
    for part in msgspec.json.decode(parts):
        identity = part if isinstance(part, str) else part.get(_KEY, {})
        if isinstance(identity, str):
            found.append(identity)
            continue
        url = identity.get("url", "") if identity.get("modality") == "image" else ""
        if not url.startswith(REFERENCE):
            return None
        found.append(ImageReference(url.removeprefix(REFERENCE)))
    return found
