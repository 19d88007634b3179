"""The size of KV caches in an engine's metrics, and how many sessions fit."""

import pytest

from tokencache.engine.capacity import CapacityError, read_capacities, sessions_that_fit


def info(**labels):
    return b"vllm:cache_config_info{%s} 1.0\n" % ",".join(f'{name}="{value}"' for name, value in labels.items()).encode()


HEAD = b"# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig\n# TYPE vllm:cache_config_info gauge\n"
ONE = {"block_size": 128, "engine": 0, "kv_cache_size_tokens": 76_800, "num_gpu_blocks": 1200, "prefix": "{x}"}


def test_each_rank_counts_without_its_null_block():
    assert read_capacities(HEAD + info(**ONE) + b"vllm:num_requests_running 3.0\n") == {"0": 76_672}
    assert read_capacities(HEAD + info(**ONE) + info(**ONE | {"engine": 1, "block_size": 16})) == {"0": 76_672, "1": 76_784}


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        (b"", "have no vllm:cache_config_info"),
        (b"\xff\x00<html>", "have no vllm:cache_config_info"),
        (info(engine=0, block_size=16), "kv_cache_size_tokens is missing"),
        (info(**ONE | {"kv_cache_size_tokens": "None"}), "kv_cache_size_tokens is 'None'"),
        (info(**ONE | {"kv_cache_size_tokens": -5}), "kv_cache_size_tokens is '-5'"),
        (info(**ONE | {"kv_cache_size_tokens": "NaN"}), "kv_cache_size_tokens is 'NaN'"),
        (info(**ONE | {"kv_cache_size_tokens": "٣"}), "not a number of tokens"),
        (info(**ONE | {"kv_cache_size_tokens": "9" * 5000}), "not a number of tokens"),
        (info(**ONE | {"kv_cache_size_tokens": 0}), "no session fits"),
        (info(**ONE | {"kv_cache_size_tokens": 128}), "no session fits"),
        (info(**ONE | {"block_size": ""}), "block_size is ''"),
        (info(**ONE) + info(**ONE), "two KV caches of the data-parallel rank '0'"),
    ],
)
def test_what_cannot_be_is_an_error_that_says_so(metrics, words):
    with pytest.raises(CapacityError, match=words):
        read_capacities(metrics)


def test_the_number_of_sessions():
    assert sessions_that_fit(100_000, 9_000) == 10
    assert sessions_that_fit(100_000, 200_000) == 1
    assert (sessions_that_fit(0, 9_000), sessions_that_fit(100_000, 0)) == (None, None)
