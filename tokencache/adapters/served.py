"""Which model does the proxy serve, and how long may its context be? Asked of the engine, through the proxy."""

import asyncio
from collections.abc import Sequence

import aiohttp
import msgspec

from tokencache.adapters.launch import DEFAULT_CONTEXT
from tokencache.adapters.load import AdapterError

_NOT_FOUND = 404
_PATIENCE = aiohttp.ClientTimeout(total=10.0)


class ListedModel(msgspec.Struct, frozen=True):
    """A model as `/v1/models` lists it; `max_model_len` (tokens) is vLLM's."""

    id: str
    max_model_len: int | None = None


class Models(msgspec.Struct, frozen=True):
    """What `/v1/models` answers."""

    data: tuple[ListedModel, ...]


def find(proxy_url: str, key: str, model: str | None) -> tuple[str, int]:
    """Return the model to name and the longest context in tokens.

    `key` is the one that the harness will send: one that the proxy does not know is refused here already. A `model` that
    is given is taken at its word, whether or not the proxy can be asked.

    Raises:
        AdapterError: no model is given, and the proxy cannot be asked or serves several.
    """
    try:
        models = asyncio.run(_ask(proxy_url, key))
    except AdapterError:
        if model is None:
            raise
        models = ()
    return choose(models, model, proxy_url)


def choose(models: Sequence[ListedModel], model: str | None, proxy_url: str) -> tuple[str, int]:
    """Return the model to name and the longest context in tokens, out of those that are served.

    Raises:
        AdapterError: no model is given, and not exactly one is served.
    """
    if model is None and len(models) != 1:
        listed = ", ".join(one.id for one in models) or "none"
        raise AdapterError(f"which model? {proxy_url} serves {listed}: name one with --model (in Python: model=)")
    name = models[0].id if model is None else model
    return name, next((one.max_model_len for one in models if one.id == name and one.max_model_len), DEFAULT_CONTEXT)


async def _ask(proxy_url: str, key: str) -> Sequence[ListedModel]:
    url = f"{proxy_url.rstrip('/')}/v1/models"
    try:
        async with (
            aiohttp.ClientSession(timeout=_PATIENCE) as http,
            http.get(url, headers={"Authorization": f"Bearer {key}"}) as answer,
        ):
            body = await answer.read()
            if answer.status != 200:  # noqa: PLR2004 - HTTP
                said = f"{url} answered {answer.status}: {body[:300].decode(errors='replace')}"
                wanted = ": the engine does not list its models, so name the model: --model NAME (in Python: model=)"
                raise AdapterError(said + (wanted if answer.status == _NOT_FOUND else ""))
            return msgspec.json.decode(body, type=Models).data
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError, msgspec.MsgspecError) as why:
        raise AdapterError(
            f"{url} does not say which model is served ({why or 'no answer in time'}): is `tokencache serve` running there, "
            "and the engine behind it? (--proxy URL, --model NAME)"
        ) from None
