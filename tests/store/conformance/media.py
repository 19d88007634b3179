"""Checks of the bytes of images and other media."""

import hashlib

from tests.store.conformance.support import EVERY_BYTE, name_of, raises, same
from tokencache.core.media import StoredMedium
from tokencache.store.base import SessionGoneError, Store

_LIMIT = 1000
_ABSENT = "0" * 64


def _described(content: bytes, media_type: str = "image/png") -> StoredMedium:
    return StoredMedium(hashlib.sha256(content).hexdigest(), media_type, len(content))


async def check_media(store: Store) -> None:
    """Media are read as they were written, are listed in order, and are stored once in each session."""
    session, other = name_of("media"), name_of("other")
    same((await store.stored_media(session), await store.media(session, _ABSENT)), ([], None), "media of a missing session")
    epoch = (await store.begin(session, "k", [])).epoch
    elsewhere = (await store.begin(other, "k", [])).epoch
    same((await store.stored_media(session), await store.media(session, _ABSENT)), ([], None), "media of a session that has none")
    contents = [EVERY_BYTE, b"\r\n\x00" * 5, b""]
    listed = [_described(content, kind) for content, kind in zip(contents, ("image/png", 'a/b;c="d"\n\u2028', ""), strict=True)]
    for medium, content in zip(listed, contents, strict=True):
        same(await store.put_media(session, epoch, medium, content, limit=_LIMIT), True, "put_media")
    for medium, content in zip(listed, contents, strict=True):
        same(await store.media(session, medium.sha256), (medium.media_type, content), "medium")
    again = _described(EVERY_BYTE, "image/jpeg")
    same(await store.put_media(session, epoch, again, EVERY_BYTE, limit=_LIMIT), True, "put_media again")
    same(await store.stored_media(session), listed, "listed media")
    same(await store.media(session, _ABSENT), None, "a medium that was not stored")
    same((await store.stored_media(other), await store.media(other, listed[0].sha256)), ([], None), "media of another session")
    same(await store.put_media(other, elsewhere, listed[0], EVERY_BYTE, limit=_LIMIT), True, "the same medium elsewhere")
    await store.delete(session)
    same(await store.media(other, listed[0].sha256), ("image/png", EVERY_BYTE), "the other session's medium, after the deletion")


async def check_media_limit(store: Store) -> None:
    """The media of a session take at most so many bytes. What is stored stays; smaller media may follow."""
    session = name_of("media-limit")
    epoch = (await store.begin(session, "k", [])).epoch
    large, too_large, small = b"a" * 600, b"b" * 401, b"c" * 400
    stored = [await store.put_media(session, epoch, _described(one), one, limit=_LIMIT) for one in (large, too_large, small, large)]
    same(stored, [True, False, True, True], "put_media")
    same(await store.stored_media(session), [_described(large), _described(small)], "listed media")
    same(await store.media(session, _described(too_large).sha256), None, "the medium that was too large")


async def check_media_deletion(store: Store) -> None:
    """Media are deleted with their session, and no late call adds any."""
    session, content = name_of("media-deletion"), b"pixels"
    medium = _described(content)
    async with raises(SessionGoneError, "put_media in a missing session"):
        await store.put_media(session, "epoch", medium, content, limit=_LIMIT)
    old = (await store.begin(session, "k", [])).epoch
    await store.put_media(session, old, medium, content, limit=_LIMIT)
    await store.delete(session)
    same((await store.stored_media(session), await store.media(session, medium.sha256)), ([], None), "media of a deleted session")
    async with raises(SessionGoneError, "put_media in a deleted session"):
        await store.put_media(session, old, medium, content, limit=_LIMIT)
    await store.delete(session, reuse=True)
    await store.begin(session, "k", [])
    async with raises(SessionGoneError, "put_media in a former epoch"):
        await store.put_media(session, old, medium, content, limit=_LIMIT)
    same((await store.stored_media(session), await store.media(session, medium.sha256)), ([], None), "media of the new epoch")
