"""Defines the entry points that vLLM loads: `tokencache` in the groups `vllm.general_plugins` and `vllm.endpoint_plugins`.

Every version of vLLM loads general plugins into every process. The general plugin patches 0.20 to 0.25, in the processes that serve HTTP.
Endpoint plugins exist since 0.26. vLLM loads them only into the processes that serve HTTP, and only if `VLLM_PLUGINS` names them
(`vllm/plugins/__init__.py`, 0.26). The endpoint plugin patches 0.26. In later versions it logs that text needs no patch, and it patches
0.27 to 0.33 for prefixes by hash, and 0.32 for images. (The general plugin would be too early for that: 0.32 loads it before it can log.)
vLLM always starts: if a version cannot be patched, the plugin logs an error and changes nothing.
"""

import logging
import multiprocessing
import os
from typing import Any

from tokencache_vllm import prefixes
from tokencache_vllm.detokenizer import patch_detokenizer
from tokencache_vllm.images import MEMBER, patch_images
from tokencache_vllm.patch import NATIVE_SINCE, UnknownVllmError, minor, patch
from tokencache_vllm.response_headers import ResponseHeaders

NAME = "tokencache"
log = logging.getLogger("vllm.plugins.tokencache")
"""A child of vLLM's own logger, so that vLLM's handlers write its messages."""

_ENDPOINT_PLUGINS_SINCE = (0, 26)
_NOT_HTTP = ("EngineCore", "Worker", "VllmWorker", "DPCoordinator")
"""Prefixes of the names of vLLM's processes that do not render (`vllm/v1/engine/utils.py`, `vllm/v1/executor/multiproc_executor.py`)."""


def register() -> None:
    """Patch vLLM 0.20 to 0.25. vLLM calls this function of the general plugin."""
    if multiprocessing.current_process().name.startswith(_NOT_HTTP):
        return
    version = _version()
    since = _number(version)
    if since < _ENDPOINT_PLUGINS_SINCE:
        _patch(version)
    elif since < NATIVE_SINCE and NAME not in os.environ.get("VLLM_PLUGINS", "").split(","):
        log.warning("tokencache: NOT ACTIVE. vLLM %s loads endpoint plugins only by name: start it with VLLM_PLUGINS=%s", version, NAME)


class EndpointPlugin:
    """Patches vLLM 0.26, 0.27 to 0.33 for prefixes, and 0.32 for images (`vllm/plugins/endpoint_plugins/interface.py`, 0.26)."""

    name = NAME
    required_tasks = None

    def attach_router(self, app: Any) -> None:
        """Add no route, but headers to responses of 0.27 to 0.33 (`response_headers`)."""
        if _number(_version()) in prefixes.VERSIONS:
            app.add_middleware(ResponseHeaders)

    async def init_state(self, engine_client: Any, _state: Any, _args: Any) -> None:
        """Patch vLLM, or log that it needs no patch. vLLM passes `None` as the engine client if it only renders."""
        _patch(_version())
        _patch_images(_version())
        if engine_client is not None and _number(_version()) in prefixes.VERSIONS:
            _patch_prefixes(engine_client)


def _number(version: str) -> tuple[int, int]:
    try:
        return minor(version)
    except UnknownVllmError:
        return 0, 0  # `patch` reports it


def _patch(version: str) -> None:
    try:
        done = patch(version)
    except UnknownVllmError as why:
        log.error("tokencache: NOT ACTIVE: nothing was changed, and supplied token ids will be ignored: %s", why)  # noqa: TRY400 - no bug
        return
    if done.where:
        log.info("tokencache: vLLM %s now accepts prompt_token_ids and required_prefix_token_ids; wrapped %s", done.version, done.where)
    else:
        log.info("tokencache: vLLM %s accepts prompt_token_ids by itself; nothing was changed", done.version)


def _patch_images(version: str) -> None:
    try:
        done = patch_images(version)
    except UnknownVllmError as why:
        log.error("tokencache: exact prompts with images are NOT ACTIVE: nothing was changed: %s", why)  # noqa: TRY400 - no bug
        return
    if done:
        log.info("tokencache: vLLM %s now accepts %s: exact prompts with images", version, MEMBER)


def _patch_prefixes(engine: Any) -> None:
    given = os.environ.get(prefixes.BYTES_VARIABLE, "") or str(prefixes.DEFAULT_BYTES)
    if not given.isdecimal():
        log.error("tokencache: prefixes by hash are NOT ACTIVE: %s=%s is not a number of bytes", prefixes.BYTES_VARIABLE, given)
        return
    if int(given) == 0:
        log.info("tokencache: prefixes by hash are off (%s=0)", prefixes.BYTES_VARIABLE)
        return
    try:
        patch_detokenizer()
        prefixes.patch_prefixes(engine, int(given))
    except UnknownVllmError as why:
        log.error("tokencache: prefixes by hash are NOT ACTIVE: nothing was changed: %s", why)  # noqa: TRY400 - no bug
        return
    log.info("tokencache: accepts %s: prefixes by hash, %s bytes kept", prefixes.MEMBER, given)


def _version() -> str:
    from vllm import __version__  # noqa: PLC0415 - importable only in vLLM's own processes

    return str(__version__)
