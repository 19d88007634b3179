"""Finds out, through the proxy, which model the engine serves, how long its context may be, and where harnesses reach the proxy."""

from collections.abc import Sequence
from http import HTTPStatus

import httpx2
import msgspec

from tokencache.adapters.launch import DEFAULT_CONTEXT
from tokencache.adapters.load import AdapterError
from tokencache.session_url import BASE_URL_ADVICE, session_url

_TIMEOUT = 10.0


class ListedModel(msgspec.Struct, frozen=True):
    """A name of a model as `/v1/models` lists it.

    Attributes:
        id: the name.
        max_model_len: its longest context in tokens; only vLLM sends it.
        root: what was loaded. vLLM lists one model under each of its names, all with the same root (0.32, `--served-model-name`), and a
            LoRA adapter with the root of the adapter.
    """

    id: str
    max_model_len: int | None = None
    root: str | None = None


class Models(msgspec.Struct, frozen=True):
    """The response of `/v1/models`."""

    data: tuple[ListedModel, ...]


class _Health(msgspec.Struct, frozen=True):
    """The response of `/healthz`."""

    public_url: str = ""


class _NotListedError(AdapterError):
    """The server answered 404."""


def find(proxy_url: str, session: str, key: str, model: str | None) -> tuple[str, int]:
    """Return the name of the model to request, and its longest context in tokens.

    The request goes to the session, as the harness's requests will: an engine has no such path. `key` is the API key that the harness
    will send, so an unknown key is already refused here. A given `model` is used even if the request fails.

    Raises:
        AdapterError: the URL is that of an engine; or no model is given, and the request fails or the proxy serves several models.
    """
    url, url_of_engines = (f"{base}/v1/models" for base in (session_url(proxy_url, session), proxy_url.rstrip("/")))
    try:
        models = _list(url, key)
    except AdapterError as error:
        if isinstance(error, _NotListedError) and _lists_models(url_of_engines, key):
            message = f"{proxy_url} is not a tokencache proxy: it answers {url_of_engines}, but to {url} it answers 404"
            raise AdapterError(f"{message}. {BASE_URL_ADVICE}") from None
        if model is None:
            raise
        models = ()
    return choose(models, model, proxy_url)


def choose(models: Sequence[ListedModel], model: str | None, proxy_url: str) -> tuple[str, int]:
    """Choose one of the listed models, and the first of its names; returns the name and the longest context in tokens.

    Raises:
        AdapterError: no model is given, and not exactly one is listed.
    """
    if model is None and len({one.root or one.id for one in models}) != 1:
        listed = ", ".join(one.id for one in models) or "none"
        raise AdapterError(f"which model? {proxy_url} serves {listed}: name one with --model (in Python: model=)")
    name = models[0].id if model is None else model
    return name, next((one.max_model_len for one in models if one.id == name and one.max_model_len), DEFAULT_CONTEXT)


def public_url(proxy_url: str) -> str:
    """Return the `--public-url` of the proxy. Without one, or if the proxy does not run yet, it is `proxy_url`."""
    try:
        response = httpx2.get(f"{proxy_url.rstrip('/')}/healthz", timeout=_TIMEOUT, trust_env=False)
        return msgspec.json.decode(response.content, type=_Health).public_url or proxy_url
    except (httpx2.HTTPError, msgspec.MsgspecError):
        return proxy_url


def _lists_models(url: str, key: str) -> bool:
    try:
        _list(url, key)
    except AdapterError:
        return False
    return True


def _list(url: str, key: str) -> Sequence[ListedModel]:
    try:
        response = httpx2.get(url, headers={"Authorization": f"Bearer {key}"}, timeout=_TIMEOUT, trust_env=False)
        if response.status_code != HTTPStatus.OK:
            hint = ": the engine does not list its models. Name the model with --model NAME (in Python: model=)"
            message = f"{url} answered {response.status_code}: {response.content[:300].decode(errors='replace')}"
            raise _NotListedError(message + hint) if response.status_code == HTTPStatus.NOT_FOUND else AdapterError(message)
        return msgspec.json.decode(response.content, type=Models).data
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError, ValueError, msgspec.MsgspecError) as error:
        raise AdapterError(
            f"cannot read the served models from {url} ({str(error) or type(error).__name__}): is `tokencache serve` running there, and "
            "its engine? (--proxy URL, --model NAME)"
        ) from None
