"""Sends scoring requests to an engine, at most a given number of tokens at a time.

Prompt log probabilities cost the engine memory that vLLM does not reserve at its start: the tokens of a chunk times the vocabulary times 4
bytes, several times over. On a CPU engine, 6,000 tokens with the 20 likeliest and a vocabulary of 152,000 killed the worker. So the
tokens that are in progress are limited, over all requests, and a sequence that is longer than the limit is refused before it is sent.
"""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any, NamedTuple, Self

import httpx2
import msgspec

from tokencache.net import is_base_url
from tokencache.scoring.request import Scores, ScoringError, read_scores, refusal_words, scoring_request
from tokencache.session_url import is_local, printable_url

_TIMEOUT = 600.0


class EngineLostError(Exception):
    """The engine cannot be used at all: it does not answer, or it is not an engine. The message says what to do."""


class ScoringModel(NamedTuple):
    """A model that the engine serves. `root` is its path; `parent` the base model of a LoRA adapter, `None` for others."""

    name: str
    root: str
    parent: str | None


class FreshReply(NamedTuple):
    """A reply that the engine sampled: its ids, and their log probabilities."""

    ids: list[int]
    logprobs: list[float]


REQUESTS_AT_ONCE = 16
"""Requests in progress. The limit of tokens at once usually allows fewer."""


class ScoringEngine:
    """An engine that scores token ids. Use it as an async context manager.

    Args:
        url: the engine's own base URL, with or without `/v1`; never that of a proxy, which would record the requests.
        key: its API key, if it requires one.
        tokens_at_once: limit of the tokens in progress.
        requests_at_once: limit of the requests in progress. vLLM's CPU build dies if a server with `--enable-lora` computes one that scores
            together with any other request (0.32, `punica_cpu.add_lora_logits`).

    Attributes:
        url: its URL for messages.
        models: the models that it serves, by name.
        salt: the `cache_salt` of this run.

    Raises:
        EngineLostError: the URL cannot be that of an engine, or httpx cannot use the web proxy that the environment names.
    """

    def __init__(self, url: str, key: str | None = None, *, tokens_at_once: int, requests_at_once: int = REQUESTS_AT_ONCE) -> None:
        base = url.rstrip("/").removesuffix("/v1")
        self.url = printable_url(base)
        if not is_base_url(base):
            raise EngineLostError(f"{self.url!r} is not the base URL of an engine, such as http://10.0.0.7:8000")
        headers = {b"Authorization": f"Bearer {key.strip()}".encode()} if key else {}
        try:
            self._http = httpx2.AsyncClient(base_url=base, timeout=_TIMEOUT, headers=headers, trust_env=not is_local(base))
        except (ImportError, ValueError, httpx2.InvalidURL) as why:
            unusable = f"the web proxy of HTTP_PROXY, HTTPS_PROXY or ALL_PROXY cannot be used: {why}"
            raise EngineLostError(f"{unusable} (if {self.url} is reached without it, unset the variable)") from None
        self._at_once = tokens_at_once
        self._room = tokens_at_once
        self._freed = asyncio.Condition()
        self._requests = asyncio.Semaphore(requests_at_once)
        self.models: dict[str, ScoringModel] = {}
        self.salt = secrets.token_hex(16)

    async def __aenter__(self) -> Self:
        """Look what the engine serves. Raises `EngineLostError` if it cannot be used."""
        try:
            await self._look()
        except BaseException:
            await self._http.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def _look(self) -> None:
        if (await self._send("GET", "/tokencache/v1/sessions?limit=1")).status_code != HTTPStatus.NOT_FOUND:
            raise EngineLostError(f"{self.url} is a tokencache proxy, or no vLLM: give the URL of the engine itself")
        reply = await self._send("GET", "/v1/models")
        if reply.status_code != HTTPStatus.OK:
            raise EngineLostError(f"{self.url}/v1/models: {refusal_words(reply.status_code, reply.content)}")
        for model in reply.json()["data"]:
            self.models[model["id"]] = ScoringModel(model["id"], str(model.get("root") or ""), model.get("parent"))

    def model(self, wanted: str | None) -> str:
        """Return the name of the model to use: the wanted one, or the engine's only base model.

        Raises:
            EngineLostError: the engine does not serve it, or serves several and none was named.
        """
        names = [wanted] if wanted else [model.name for model in self.models.values() if model.parent is None]
        if len(names) != 1 or names[0] not in self.models:
            served = ", ".join(self.models) or "none"
            raise EngineLostError(f"{self.url} serves {served}: name the model that scores with --model")
        return names[0]

    async def weight_version(self) -> str:
        """Return the engine's own label of its weights (`/weight_info`); `""` if it has none, or only `default`."""
        reply = await self._send("GET", "/weight_info")
        version = str(reply.json().get("weight_version") or "") if reply.status_code == HTTPStatus.OK else ""
        return "" if version == "default" else version

    async def score(self, ids: list[int], model: str, *, top: int = 0) -> Scores:
        """Return the log probabilities of a sequence.

        Raises:
            ScoringError: the engine refuses it or returns none, or the sequence is longer than the limit.
            EngineLostError: the engine does not answer.
        """
        if len(ids) == 1:  # nothing precedes the only token
            return Scores([0.0], [[]] if top else [], [[]] if top else [], 0)
        async with self._taken(len(ids)):
            reply = await self._send("POST", "/v1/completions", scoring_request(ids, model, top=top, salt=self.salt))
        if reply.status_code != HTTPStatus.OK:
            raise ScoringError(refusal_words(reply.status_code, reply.content))
        return read_scores(reply.content, ids, top=top)

    async def sample(self, ids: list[int], model: str, tokens: int) -> FreshReply:
        """Sample a reply of so many tokens from the unchanged distribution: temperature 1, without top-p and masks.

        Raises:
            ScoringError: the engine refuses it, or returns no ids or log probabilities.
            EngineLostError: the engine does not answer.
        """
        neutral = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "ignore_eos": True}
        body = {"model": model, "prompt": ids, "max_tokens": tokens, "logprobs": 0, "return_token_ids": True, "cache_salt": self.salt}
        async with self._taken(len(ids) + tokens):
            reply = await self._send("POST", "/v1/completions", body | neutral)
        if reply.status_code != HTTPStatus.OK:
            raise ScoringError(refusal_words(reply.status_code, reply.content))
        (choice,) = reply.json()["choices"]
        if not choice.get("token_ids") or not choice.get("logprobs"):
            raise ScoringError("the engine returned no token ids or no log probabilities for a reply of its own")
        return FreshReply(choice["token_ids"], choice["logprobs"]["token_logprobs"])

    @contextlib.asynccontextmanager
    async def _taken(self, tokens: int) -> AsyncIterator[None]:
        """Wait until so many tokens may be in progress."""
        if tokens > self._at_once:
            raise ScoringError(
                f"{tokens:,} tokens are more than --max-tokens-at-once {self._at_once:,}: raise it, if the engine has the memory "
                "(start it with a small --max-num-batched-tokens)"
            )
        async with self._freed:
            await self._freed.wait_for(lambda: self._room >= tokens)
            self._room -= tokens
        try:
            async with self._requests:
                yield
        finally:
            async with self._freed:
                self._room += tokens
                self._freed.notify_all()

    async def _send(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx2.Response:
        content = None if body is None else msgspec.json.encode(body)
        try:
            return await self._http.request(method, path, content=content, headers={"Content-Type": "application/json"})
        except httpx2.TransportError as error:
            raise EngineLostError(f"{self.url} does not answer ({type(error).__name__}: {error})") from None
