"""Images of a row, loaded from files and checked."""

import msgspec
import numpy as np
import pytest

from tests.batching.made import as_trajectory, shape
from tests.media import BLUE, RED, described
from tests.trajectories.images import of_talk, placed, sampled_placeholder, seeing
from tokencache.batching import image_inputs, load_images, load_media, no_placeholders, select
from tokencache.engine.images import png
from tokencache.integrations.rows import RowsError, choose_rows


@pytest.fixture
def folder(tmp_path):
    for content in (RED, BLUE):
        (tmp_path / f"{described(content).sha256}.png").write_bytes(content)
    return tmp_path


@pytest.fixture
def sequence():
    return as_trajectory(of_talk(seeing())).sequences[0]


def with_media(sequence, *media):
    return msgspec.structs.replace(sequence, media=list(media))


def test_the_images_of_a_row_in_order(folder, sequence):
    assert load_media(sequence, folder) == [RED, BLUE]
    assert load_media(with_media(sequence, placed(BLUE), placed(RED), placed(BLUE)), str(folder)) == [BLUE, RED, BLUE]
    assert load_media(shape("linear").sequences[0], folder) == []
    with pytest.raises(ValueError, match="has media whose places are not known"):
        load_media(with_media(sequence), folder)


def test_as_images_of_pillow(folder, sequence):
    assert [image.getpixel((0, 0)) for image in load_images(sequence, folder)] == [(255, 0, 128), (0, 255, 128)]


def test_what_cannot_be_loaded_is_named(folder, sequence):
    with pytest.raises(OSError, match=described(png(9, 9, 9)).sha256):
        load_media(with_media(sequence, placed(png(9, 9, 9))), folder)
    with pytest.raises(ValueError, match="medium 2 was sent as a URL"):
        load_media(with_media(sequence, placed(), msgspec.structs.replace(placed(), sha256="")), folder)
    (folder / f"{described(RED).sha256}.png").write_bytes(BLUE)
    with pytest.raises(ValueError, match="medium 1 has another SHA-256"):
        load_media(sequence, folder)
    broken = b"not an image"
    (folder / f"{described(broken).sha256}.png").write_bytes(broken)
    with pytest.raises(ValueError, match="not an image that Pillow can read"):
        load_images(with_media(sequence, placed(broken)), folder)
    (folder / f"{described(broken).sha256}.wav").write_bytes(broken)
    with pytest.raises(ValueError, match="has audio"):
        load_images(with_media(sequence, placed(broken, modality="audio", media_type="audio/wav")), folder)


def test_rows_with_sampled_placeholders_are_dropped_and_listed():
    trajectory = as_trajectory(of_talk(sampled_placeholder()))
    chosen = select([trajectory], no_placeholders)
    assert [row.sequence.id for row in chosen.kept] == [trajectory.sequences[1].id]
    assert {one.rule for one in chosen.dropped} == {"no_placeholders"}
    assert [row.sequence.id for row in choose_rows(trajectory, "all", several=True, images=True).kept] == [trajectory.sequences[1].id]


def test_a_trainer_that_gets_no_images_gets_no_row_with_images():
    trajectory = as_trajectory(of_talk(seeing()))
    with pytest.raises(RowsError, match=r"has images in .*load_images"):
        choose_rows(trajectory, "longest", several=False)
    assert choose_rows(trajectory, "longest", several=False, images=True).kept


class Grids:
    """An image processor as the Qwen-VL family has it, for images of one patch row."""

    merge_size = 2

    def __init__(self, *tokens):
        self.tokens = tokens

    def __call__(self, images, return_tensors):
        assert return_tensors == "pt"
        return {"image_grid_thw": np.array([[1, 2, 2 * tokens] for tokens in self.tokens[: len(images)]])}


def test_images_are_processed_as_the_engine_did(sequence):
    lengths = [medium.length for medium in sequence.media]
    assert set(image_inputs(sequence, [object()] * 2, Grids(*lengths))) == {"image_grid_thw"}
    with pytest.raises(ValueError, match=f"image 2 has {lengths[1]} tokens, and this processor makes {lengths[1] + 1}"):
        image_inputs(sequence, [object()] * 2, Grids(lengths[0], lengths[1] + 1))
