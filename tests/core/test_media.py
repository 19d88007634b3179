"""Identities of media: equal however an image is written, different for anything that is another image."""

import base64

import pytest

from tokencache.core.media import decode_base64, media_identity, references_in

PIXELS = b"\x89PNG one image\xfb\xff"
TEXT = base64.b64encode(PIXELS).decode()


def image(url, **members):
    return {"type": "image_url", "image_url": {"url": url}, **members}


PLAIN = image(f"data:image/png;base64,{TEXT}")
ALIKE = {
    "wrapped lines": image("data:image/png;base64," + "\r\n".join(TEXT[i : i + 7] for i in range(0, len(TEXT), 7))),
    "spaces": image(f"data:image/png;base64, {TEXT} "),
    "no padding": image(f"data:image/png;base64,{TEXT.rstrip('=')}"),
    "another media type, as of a renamed file": image(f"data:image/jpeg;base64,{TEXT}"),
    "no media type": image(f"data:;base64,{TEXT}"),
    "a parameter": image(f"data:image/png;name=shot.png;base64,{TEXT}"),
    "upper case": image(f"DATA:image/PNG;BASE64,{TEXT}"),
    "a cache mark": image(f"data:image/png;base64,{TEXT}", cache_control={"type": "ephemeral"}),
    "the default detail": {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{TEXT}", "detail": "auto"}},
    "members without a value": image(f"data:image/png;base64,{TEXT}", uuid=None),
    "a URL instead of an object": {"type": "image_url", "image_url": f"data:image/png;base64,{TEXT}"},
    "other order of members": {"image_url": {"url": f"data:image/png;base64,{TEXT}"}, "type": "image_url"},
}
OTHER = {
    "encoded again": image("data:image/png;base64," + base64.b64encode(PIXELS + b"\0").decode()),
    "no image": image("data:image/png;base64,"),
    "another detail": {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{TEXT}", "detail": "low"}},
    "a uuid, which vLLM trusts": image(f"data:image/png;base64,{TEXT}", uuid="u1"),
    "a URL that is not fetched": image("https://example.com/one.png"),
    "another URL": image("https://example.com/two.png"),
    "a URL with the same bytes in it": image(f"https://example.com/;base64,{TEXT}"),
    "base64 for URLs": image(f"data:image/png;base64,{TEXT.replace('/', '_').replace('+', '-')}"),
    "not base64": image(f"data:image/png;base64,{TEXT}%3D"),
    "not said to be base64": image(f"data:image/png,{TEXT}"),
    "outside ASCII": image(f"data:image/png;base64,{TEXT}\u00e9"),
    "a video": {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{TEXT}"}},
    "a video of another type": {"type": "video_url", "video_url": {"url": f"data:video/jpeg;base64,{TEXT}"}},
    "audio": {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{TEXT}"}},
    "inline audio": {"type": "input_audio", "input_audio": {"data": TEXT, "format": "wav"}},
    "inline audio of another format": {"type": "input_audio", "input_audio": {"data": TEXT, "format": "mp3"}},
    "inline audio that is not base64": {"type": "input_audio", "input_audio": {"data": "?", "format": "wav"}},
    "an unknown kind": {"type": "image", "image": TEXT},
    "a kind that is no text": {"type": ["image_url"], "image_url": {"url": TEXT}},
    "no kind": {"image_url": {"url": f"data:image/png;base64,{TEXT}"}},
    "no URL": {"type": "image_url", "image_url": None},
    "what an identity looks like": media_identity(PLAIN),
}


@pytest.mark.parametrize("name", ALIKE)
def test_one_image_is_the_same_however_it_is_written(name):
    assert media_identity(ALIKE[name]) == media_identity(PLAIN)


def test_anything_else_is_another_image():
    identities = [media_identity(part) for part in (PLAIN, *OTHER.values())]
    alike = [(a, b) for i, a in enumerate(identities) for b in identities[:i] if a == b]
    assert alike == []


def test_inline_audio_is_identified_by_its_bytes():
    one = {"type": "input_audio", "input_audio": {"data": TEXT, "format": "wav"}}
    other = {"type": "input_audio", "input_audio": {"data": TEXT[:8] + "\n" + TEXT[8:], "format": "wav"}}
    assert media_identity(one) == media_identity(other)


@pytest.mark.parametrize(
    ("text", "content"), [("", b""), ("Zg==", b"f"), ("Zg", b"f"), (" Z\ng\t", b"f"), ("Z", None), ("Z===", None), ("Zg=a", None)]
)
def test_base64_is_decoded_or_refused(text, content):
    assert decode_base64(text) == content


def test_stored_messages_name_their_media():
    parts = [
        {"type": "text", "text": "hi"},
        {"type": "image_url", "image_url": {"url": "media:ab", "detail": "high"}},
        {"type": "image_url", "image_url": "media:cd"},
        {"type": "input_audio", "input_audio": {"data": "media:ef", "format": "wav"}},
        {"type": "image_url", "image_url": {"url": "https://host/x.png"}},
        {"type": "unknown", "of": "media:12"},
    ]
    found = references_in({"role": "user", "content": parts})
    assert [tuple(one) for one in found] == [("image", "ab"), ("image", "cd"), ("audio", "ef"), ("image", ""), ("", "")]
    assert references_in({"role": "user", "content": "media:ab"}) == []
    assert references_in({"role": "user"}) == []
