"""Images for tests: small PNG files of any size, made without an imaging library."""

import base64

from tokencache.engine.images import png


def data_uri(content, media_type="image/png"):
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"


def image(shade, *, width=28, height=28):
    """A content part of chat completions with an image of one shade; other shades are other images."""
    return {"type": "image_url", "image_url": {"url": data_uri(png(width, height, shade))}}
