"""Loads the images of a sequence, for trainers of models that see.

A trainer needs the expanded ids of a sequence, as they are in the trajectory, and its images in order. The files are those that
`tokencache media` or `tokencache export --media` wrote.
"""

from __future__ import annotations

import hashlib
import io
import math
from typing import TYPE_CHECKING, Any

from tokencache.batching.files import read_file
from tokencache.core.media import file_name

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from PIL.Image import Image

    from tokencache.core.media import PlacedMedia
    from tokencache.trajectories.values import Sequence


def load_media(sequence: Sequence, root: str | Path) -> list[bytes]:
    """Return the bytes of the images and other media of a sequence, in order. An image that occurs twice is there twice.

    Args:
        sequence: the sequence.
        root: the folder of the files, or a URL, which needs the extra `experts`.

    Raises:
        ValueError: the places of its media are not known (`has_unplaced_media`), a medium was sent as a URL, so its bytes are not known,
            or a file has another content than its name says.
        OSError: a file cannot be read: perhaps its bytes were not kept (`media-not-kept` in the marks of a turn).
    """
    return contents_of(sequence, lambda medium: read_file(root, file_name(medium.sha256, medium.media_type)))


def load_images(sequence: Sequence, root: str | Path) -> list[Image]:
    """Return the images of a sequence in order, as images of Pillow. `load_media` documents the arguments and errors.

    Raises:
        ValueError: it has video or audio, or a file is not an image that Pillow can read.
        ModuleNotFoundError: Pillow is not installed.
    """
    return images_of(sequence, lambda medium: read_file(root, file_name(medium.sha256, medium.media_type)))


def images_of(sequence: Sequence, read: Callable[[PlacedMedia], bytes]) -> list[Image]:
    """Return the images of a sequence in order, as `load_images` does. `read` returns the bytes of one.

    Raises:
        ValueError, ModuleNotFoundError: see `load_images`.
    """
    return [open_image(content) for content in images_only(sequence, contents_of(sequence, read))]


def image_inputs(sequence: Sequence, images: list[Image], processor: Any) -> dict[str, Any]:
    """Process the images of a sequence with the model's own image processor, for the model's code or a trainer's.

    Args:
        sequence: the sequence.
        images: its images, in order (`load_images`).
        processor: an image processor of transformers.

    Returns:
        What the processor returns, as tensors of torch. For the Qwen-VL family: `pixel_values`, one row for each patch of all images, and
        `image_grid_thw`, three numbers for each image.

    Raises:
        ValueError: the processor makes another number of tokens of an image than the engine did, so that it has other settings. This can be
            checked only for processors that return `image_grid_thw`.
    """
    made = dict(processor(images=images, return_tensors="pt"))
    grids = made.get("image_grid_thw")
    if grids is not None:
        for n, (grid, medium) in enumerate(zip(grids.tolist(), sequence.media, strict=True), 1):
            tokens = math.prod(grid) // processor.merge_size**2
            if tokens != medium.length:
                raise ValueError(f"sequence {sequence.id}: image {n} has {medium.length} tokens, and this processor makes {tokens} of it")
    return made


def contents_of(sequence: Sequence, read: Callable[[PlacedMedia], bytes]) -> list[bytes]:
    """Return the bytes of the media of a sequence, each checked against its digest. `read` returns those of one.

    Raises:
        ValueError: the places of its media or the bytes of one are not known, or `read` returned another content.
    """
    if sequence.has_unplaced_media:
        raise ValueError(f"sequence {sequence.id} has media whose places are not known: the engine did not report them (docs/images.md)")
    found = []
    for n, medium in enumerate(sequence.media, 1):
        if not medium.sha256:
            raise ValueError(f"sequence {sequence.id}: medium {n} was sent as a URL, so its bytes are not known")
        content = read(medium)
        if hashlib.sha256(content).hexdigest() != medium.sha256:
            raise ValueError(f"sequence {sequence.id}: what was read for medium {n} has another SHA-256 than {medium.sha256}")
        found.append(content)
    return found


def images_only(sequence: Sequence, contents: list[bytes]) -> list[bytes]:
    """Return the contents of a sequence's media. Raises `ValueError` if one of them is not an image."""
    other = next((medium.modality for medium in sequence.media if medium.modality != "image"), None)
    if other is not None:
        raise ValueError(f"sequence {sequence.id} has {other}, and only images can be loaded")
    return contents


def open_image(content: bytes) -> Image:
    """Decode an image.

    Raises:
        ValueError: Pillow cannot read it.
        ModuleNotFoundError: Pillow is not installed.
    """
    try:
        from PIL import Image, UnidentifiedImageError  # noqa: PLC0415 - only trainers of models that see have it
    except ModuleNotFoundError as why:
        raise ModuleNotFoundError(f"images need Pillow: {why}. pip install pillow", name=why.name) from why
    try:
        image = Image.open(io.BytesIO(content))
        image.load()
    except (UnidentifiedImageError, OSError) as why:
        raise ValueError(f"not an image that Pillow can read: {why}") from None
    return image
