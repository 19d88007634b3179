"""Finds out, through the proxy, which model the engine serves and how long its context may be."""

from collections.abc import Sequence

import httpx2
import msgspec

from tokencache.adapters.launch import DEFAULT_CONTEXT
from tokencache.adapters.load import AdapterError

_OK, _NOT_FOUND = 200, 404
_TIMEOUT = 10.0


class ListedModel(msgspec.Struct, frozen=True):
    """A model as `/v1/models` lists it; `max_model_len` (tokens) is vLLM's."""

    id: str
    max_model_len: int | None = None


class Models(msgspec.Struct, frozen=True):
    """The response of `/v1/models`."""

    data: tuple[ListedModel, ...]


def find(proxy_url: str, key: str, model: str | None) -> tuple[str, int]:
    """Return the name of the model to request, and its longest context in tokens.

    `key` is the API key that the harness will send, so an unknown key is already refused here. A given `model` is used even if the
    request fails.

    Raises:
        AdapterError: no model is given, and the request fails or the proxy serves several models.
    """
    try:
        models = _list(f"{proxy_url.rstrip('/')}/v1/models", key)
    except AdapterError:
        if model is None:
            raise
        models = ()
    return choose(models, model, proxy_url)


def choose(models: Sequence[ListedModel], model: str | None, proxy_url: str) -> tuple[str, int]:
    """Choose one of the listed models; returns its name and its longest context in tokens.

    Raises:
        AdapterError: no model is given, and not exactly one is listed.
    """
    if model is None and len(models) != 1:
        listed = ", ".join(one.id for one in models) or "none"
        raise AdapterError(f"which model? {proxy_url} serves {listed}: name one with --model (in Python: model=)")
    name = models[0].id if model is None else model
    return name, next((one.max_model_len for one in models if one.id == name and one.max_model_len), DEFAULT_CONTEXT)


def _list(url: str, key: str) -> Sequence[ListedModel]:
    try:
        response = httpx2.get(url, headers={"Authorization": f"Bearer {key}"}, timeout=_TIMEOUT, trust_env=False)
        if response.status_code != _OK:
            hint = ": the engine does not list its models. Name the model with --model NAME (in Python: model=)"
            message = f"{url} answered {response.status_code}: {response.content[:300].decode(errors='replace')}"
            raise AdapterError(message + (hint if response.status_code == _NOT_FOUND else ""))
        return msgspec.json.decode(response.content, type=Models).data
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError, ValueError, msgspec.MsgspecError) as error:
        raise AdapterError(
            f"cannot read the served models from {url} ({str(error) or type(error).__name__}): is `tokencache serve` running there, and "
            "its engine? (--proxy URL, --model NAME)"
        ) from None
