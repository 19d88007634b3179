"""Lists the engine's routes that sample nothing. Within a session, every other route that no dialect serves may sample without a record.

The list is that of vLLM 0.32 (`build_app`), with those of 0.24 to 0.33; `tests/system/e2e/test_engine_routes.py` compares it with a running
vLLM. What a route does there, by method and path:

looks something up   health, version, models, metrics, load, states of sleep, pause and weights, the documentation
renders or parses    `/tokenize`, `/detokenize`, `…/render`, `…/derender`
pools                embeddings, classes and scores of pooling models, which sample no tokens
administers          pause, sleep, caches, adapters, weights, profiles
"""

_LOOKED_UP = (
    *("/health", "/ping", "/version", "/v1/models", "/metrics", "/load", "/server_info", "/tokenizer_info", "/kv_event_sources"),
    *("/is_sleeping", "/is_paused", "/weight_info", "/get_world_size", "/fault_tolerance/status"),
    *("/docs", "/redoc", "/openapi.json", "/docs/oauth2-redirect"),
)
_POSTED = (
    *("/ping", "/tokenize", "/detokenize"),
    *(f"/v1/{dialect}/render" for dialect in ("chat/completions", "completions", "messages", "responses")),
    *("/v1/chat/completions/derender", "/v1/completions/derender"),
    *("/v1/embeddings", "/v2/embed", "/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"),
    *("/pause", "/resume", "/sleep", "/wake_up", "/release_kv_cache_memory", "/abort_requests", "/inference/v1/abort_requests"),
    *("/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
    *("/init_weight_transfer_engine", "/shutdown_weight_transfer_engine", "/start_weight_update", "/start_draft_weight_update"),
    *("/update_weights", "/finish_weight_update", "/update_weight_version", "/weight_checker"),
    *("/start_profile", "/stop_profile", "/scale_elastic_ep", "/is_scaling_elastic_ep", "/fault_tolerance/apply"),
)
LISTED = frozenset(
    {
        *((method, route) for method in ("GET", "HEAD") for route in _LOOKED_UP),
        *(("POST", route) for route in _POSTED),
    }
)
"""Pairs of method and route."""


def samples_nothing(method: str, route: str) -> bool:
    """Whether a request to an engine's route that no dialect serves is known to sample nothing."""
    return method == "OPTIONS" or (method, route) in LISTED
