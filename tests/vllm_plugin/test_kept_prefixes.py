"""The conversations that the plugin keeps: their hashes are the proxy's, and their bytes are bounded."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokencache.core import ids as core_ids
from tokencache_vllm.kept_prefixes import HashedPrompt, KeptPrefixes, pack, unpack

IDS = st.lists(st.integers(0, 2**31 - 1))


def sha256(tokens):
    return hashlib.sha256(core_ids.pack(tokens)).digest()


@given(IDS)
def test_ids_are_packed_as_the_proxy_packs_them(tokens):
    assert pack(tokens) == core_ids.pack(tokens)
    assert unpack(pack(tokens)) == tokens


@given(IDS, IDS)
def test_a_conversation_is_found_by_the_hash_of_prompt_and_reply(prompt, reply):
    cache = KeptPrefixes(2**20)
    conversation = HashedPrompt(pack(prompt))
    conversation.keep(reply, cache)
    assert conversation.digest == sha256(prompt).hex()
    assert cache.find(sha256(prompt + reply)) == core_ids.pack(prompt + reply)


def test_several_replies_of_one_prompt_are_kept():
    cache, conversation = KeptPrefixes(100), HashedPrompt(pack([1, 2]))
    conversation.keep([3], cache)
    conversation.keep([4], cache)
    assert [cache.find(sha256([1, 2, last])) for last in (3, 4, 5)] == [pack([1, 2, 3]), pack([1, 2, 4]), None]


def test_the_bytes_are_bounded_and_the_least_recently_used_leaves():
    cache = KeptPrefixes(24)
    for first in (1, 2):
        HashedPrompt(pack([first, 0])).keep([9], cache)  # 12 bytes each
    assert cache.find(sha256([1, 0, 9])) is not None
    HashedPrompt(pack([3, 0])).keep([9], cache)
    assert [cache.find(sha256([first, 0, 9])) is not None for first in (1, 2, 3)] == [True, False, True]


def test_a_conversation_larger_than_the_cache_is_not_kept_and_displaces_nothing():
    cache = KeptPrefixes(12)
    HashedPrompt(pack([1, 2])).keep([3], cache)
    HashedPrompt(pack([1, 2])).keep([3, 4], cache)
    assert cache.find(sha256([1, 2, 3])) is not None
    assert cache.find(sha256([1, 2, 3, 4])) is None


def test_ids_that_do_not_fit_are_refused():
    with pytest.raises(OverflowError):
        pack([2**31])
