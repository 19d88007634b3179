"""The corpus identifies no recorder and quotes no harness's makers; and stand-ins have the promised shape."""

import re
from pathlib import Path

import pytest

from tests.system.corpus.format import FORMAT, read
from tests.system.corpus.sanitise import Sanitiser, asked_in, image_in, strings_in
from tests.system.corpus.standins import StandIns

FILES = sorted(Path(__file__).parent.glob("*.jsonl"))
TOO_LARGE = 300_000
TRACES = {
    "a path of a machine": r"(?<![\w.<-])/(?:home|Users|root|private|mnt|tmp(?!/tokencache-lab))/\w|C:\\\\Users",
    "an e-mail address": r"[\w.+-]+@[\w-]+\.\w+",
    "an address of a network": r"(?<![\d.])(?!127\.0\.0\.1|0+\.0+\.0+\.0+)\d{1,3}(?:\.\d{1,3}){3}(?![\d.])",
    "a date": r"(?<![\d-])(?<!version\":\")20[2-9]\d-[01]\d-[0-3]\d(?!-|\d)|\b(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun), \d",
    "a time in milliseconds": r"(?<!\d)1[6-9]\d{11}(?!\d)",
    "a key": r"\b(?:sk|tcs|tck)-\w+|[Bb]earer ",
    "how makers begin": r"You are (?:a|an|the|Claude|Kimi|Hermes|Gemini|opencode|Qwen|OpenHands|pair)\b",
}
each = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)


@each
@pytest.mark.parametrize("trace", TRACES)
def test_it_contains_no(path, trace):
    found = [match[0] for match in re.finditer(TRACES[trace], path.read_text(encoding="utf-8"))]
    assert not found


@each
def test_it_is_of_a_reasonable_size_and_describes_itself(path):
    assert path.stat().st_size < TOO_LARGE
    header = read(path).header
    assert header.format == FORMAT
    assert path.stem == f"{header.harness}-{header.version}"


@each
def test_its_images_say_nothing_about_who_made_them(path):
    """PNGs of the task, without the chunks that hold text, a time or a camera's data (PNG specification, 11.3)."""
    images = [image for call in read(path).calls for text in strings_in(call.body) if (image := image_in(text)) is not None]
    assert bool(images) == ("_images" in path.stem)
    for image in images:
        assert image.startswith(b"\x89PNG")
        assert not {b"tEXt", b"zTXt", b"iTXt", b"tIME", b"eXIf", b"iCCP"} & {image[at : at + 4] for at in range(len(image) - 3)}


@pytest.fixture
def standins():
    return StandIns(b"key", kept=["Create hello.txt"])


PROMPT = "You are Kit.\n\n# Tools\n- Use `Read` FIRST (at most 20 lines); then <example>…</example>.\n\tEnd — naïve ☕\n"


def shape(text):
    return [
        "A" if c.isupper() and c.isascii() else "a" if c.isascii() and c.isalpha() else "0" if c.isascii() and c.isdigit() else c
        for c in text
    ]


def test_a_stand_in_has_the_same_shape_and_other_words(standins):
    made = standins.text(PROMPT)
    assert shape(made) == shape(PROMPT)
    assert not set(re.findall(r"[A-Za-z]{4,}", made)) & set(re.findall(r"[A-Za-z]{4,}", PROMPT)) - {"example"}


def test_equal_texts_stay_equal_and_different_ones_different(standins):
    assert standins.text(PROMPT) == standins.text(PROMPT)
    assert standins.text("Today is 2026-11-21") != standins.text("Today is 2026-11-22")
    made, longer = standins.text(PROMPT), standins.text(PROMPT + "And more.\n")
    assert longer.startswith(made)
    other = standins.text("You are Kit.\n\n# Tools\n- Use `Write` first")
    assert made.startswith(other[: other.index("`") + 1])


def test_what_the_user_asked_stays(standins):
    made = standins.text("<user>Create hello.txt, please</user>")
    assert made.startswith("<user>Create hello.txt, ")
    assert "please" not in made


def test_another_key_gives_other_words():
    assert StandIns(b"one").text(PROMPT) != StandIns(b"two").text(PROMPT)


def test_the_owner_of_a_text_decides():
    sanitiser = Sanitiser(b"key", ["Do it now"], ["I shall list files", "ls -la"], ["call-0123456789abcdef"])
    body = sanitiser.body(
        {
            "model": "m",
            "tools": [{"type": "function", "name": "shell", "parameters": {"type": "object", "description": "Runs something"}}],
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Do it now"},
                {"role": "assistant", "content": "I shall list files", "tool_calls": [{"id": "call-0123456789abcdef"}]},
                {"role": "tool", "tool_call_id": "call-0123456789abcdef", "content": "Exit code 0\nfiles"},
            ],
            "user": "0a1b2c3d-0a1b-0a1b-0a1b-0a1b2c3d4e5f",
        }
    )
    system, user, assistant, result = body["messages"]
    assert body["tools"][0]["name"] == "shell"
    assert body["tools"][0]["parameters"]["type"] == "object"
    assert "Runs" not in body["tools"][0]["parameters"]["description"]
    assert "brief" not in system["content"]
    assert user["content"] == "Do it now"
    assert (assistant["content"], assistant["tool_calls"][0]["id"]) == ("I shall list files", "call-0123456789abcdef")
    assert result["content"].endswith("\nfiles")
    assert "code" not in result["content"]
    assert body["user"] != "0a1b2c3d-0a1b-0a1b-0a1b-0a1b2c3d4e5f"
    assert re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", body["user"])


PNG = "iVBORw0KGgoAAAANSUhEUgAAAEAAAAAwCAIAAAAuKetIAAAAx0FFQQ=="


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}},
        {"type": "input_image", "image_url": f"data:image/png;base64,{PNG}", "detail": "high"},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}},
    ],
)
@pytest.mark.parametrize("role", ["user", "tool", "assistant"])
def test_images_stay_and_what_is_beside_them_does_not(part, role):
    body = {"messages": [{"role": role, "content": [{"type": "text", "text": "Attached media from tool result:"}, part]}]}
    sanitised = Sanitiser(b"key", asked_in([body]), [], []).body(body)
    label, image = sanitised["messages"][0]["content"]
    assert image == part
    assert role == "assistant" or label["text"] != "Attached media from tool result:"


def test_long_text_that_only_looks_like_base64_is_no_image():
    assert image_in("iVBORw0KGgo is how every PNG begins, in base64") is None
    assert image_in("Rm9ydHkgY2hhcmFjdGVycyBvZiB0ZXh0LCBpbiBiYXNlNjQ=") is None
