"""Writes the requests of one call for an engine and posts them.

What an engine has already is not sent again: images are named by a hash (`engine.image_names`), and so is the beginning of the prompt
(`engine.prefixes`). If the engine no longer has it, the same request is posted again with all of it. In both cases the engine has refused
the first one, so nothing was sampled.
"""

import logging
from collections.abc import Awaitable
from http import HTTPStatus

import msgspec
from multidict import CIMultiDict

from tokencache import metrics
from tokencache.core import ids
from tokencache.core.incidents import IncidentKind
from tokencache.dialects.chat.request import ChatCall
from tokencache.engine.connections import Answer
from tokencache.engine.drivers.base import EngineRequest, ExactPrompt, Target
from tokencache.engine.image_names import ImageNames, NamedImage, with_pixels
from tokencache.engine.model import Engine
from tokencache.engine.prefixes import MEMBER, PrefixUse, PromptName, can_be_named, is_miss
from tokencache.engine.ranks import RANK_HEADER, is_refused_rank
from tokencache.errors import NOT_NOW, OK, EngineError, is_error
from tokencache.proxy.facts import BegunCall, PlannedCall
from tokencache.proxy.kv_salt import MEMBER as SALT
from tokencache.proxy.planner import media_reason
from tokencache.proxy.response import REQUEST_ID, Exchange
from tokencache.proxy.routed_experts import request_experts

log = logging.getLogger(__name__)

REFUSED = frozenset({HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY})
_JSON_BYTES = 6
"""Bytes of an id as JSON, with its comma, about: most ids have five digits."""


class EngineSender(msgspec.Struct, eq=False):
    """Posts the requests of one call.

    Attributes:
        call: the call.
        exchange: what its dialect sends.
        images: names the images.
        prefixes: names the prompts.
        experts: whether routed experts are requested.
        request: the request that was posted last, without its body; without a path before the first.
        posted: its id.
        streams: whether it asks for a stream if the client requested one.
        proven: whether the answer to it proves by a hash that the engine was given the exact prompt.
    """

    call: BegunCall
    exchange: Exchange
    images: ImageNames
    prefixes: PrefixUse
    experts: bool
    request: EngineRequest = EngineRequest("", b"")
    posted: str = ""
    streams: bool = False
    proven: bool = False
    _posts: int = 0

    def target(self, planned: PlannedCall) -> Target:
        """Return where a request of this call is sent, with the names of its images."""
        chat, model = self.call.chat, planned.model
        engine, path, headers = planned.engine.upstream, self.exchange.path, self.exchange.headers
        if model is None:
            return Target(engine, path, headers)
        known = model.capability
        if not chat.media:
            return Target(engine, path, headers, known.max_model_len, generates=known.generates)
        names: tuple[NamedImage, ...] = ()
        if not media_reason(chat, model):
            salt = planned.weights.salt.text or bytes(chat.fields.get(SALT, b"")).decode(errors="backslashreplace")
            names = self.images.of_call(chat, engine.url, salt)
        return Target(engine, path, headers, known.max_model_len, known.image_support, names, generates=known.generates)

    def post(self, planned: PlannedCall, exact: ExactPrompt | None, chat: ChatCall) -> Awaitable[Answer]:
        """Post a request with an exact prompt; with `None` the engine renders. After a failure the engine is probed again.

        Args:
            planned: the call as it is planned for an engine.
            exact: the exact prompt.
            chat: the request for the engine: that of the plan, or of a piece of the reply.

        Raises:
            EngineError: the engine cannot be reached.
        """
        self.proven = False
        target = self.target(planned)
        if target.names:
            return self._post_images(planned, exact, chat, target)
        name = self._name(planned, exact, chat)
        if name is None:
            return self._write_and_post(planned, exact, chat, target)
        return self._post_named(planned, exact, chat, target, name)

    def _name(self, planned: PlannedCall, exact: ExactPrompt | None, chat: ChatCall) -> PromptName | None:
        """Name the prompt, if the engine accepts that.

        The prompt of a piece of a reply is not named: what was sampled of a reply that was broken off is not kept.
        """
        model = planned.model
        if model is None or not model.capability.prefixes or not can_be_named(chat):
            return None
        if exact is None:
            return PromptName(experts=self.experts)
        last = exact.last_reply
        if not last.end:
            return None
        name = self.prefixes.name(planned.engine.upstream.url, exact.ids, (last.start, last.end), echo=chat.shows_ids)
        return msgspec.structs.replace(name, experts=self.experts)

    async def _post_named(
        self, planned: PlannedCall, exact: ExactPrompt | None, chat: ChatCall, target: Target, name: PromptName
    ) -> Answer:
        """Post a request that names its prompt. Post it again with all ids if the engine does not have them, or does not use them."""
        call, engine = self.call, planned.engine
        answer = await self._write_and_post(planned, exact, chat, msgspec.structs.replace(target, prompt=name))
        if not self.request.named:
            return answer
        if exact is not None and is_miss(answer.headers):
            answer.close()
            self.prefixes.noted(engine.upstream.url, hit=False)
            metrics.counter(metrics.PREFIXES, "missed").inc()
            log.debug("session %s call %s: the engine does not have its prefix; all ids are sent", call.session, call.id)
            name = name.whole(exact.ids)
            answer = await self._write_and_post(planned, exact, chat, msgspec.structs.replace(target, prompt=name))
        if answer.status == OK and name.is_proven(answer.headers):
            if exact is not None:
                self._note_proven(engine, exact, name)
            return answer
        problem = await self._problem(answer)
        if not problem:
            return answer
        log.warning("session %s call %s: %s; all ids are sent", call.session, call.id, problem)
        answer.close()
        engine.doubt(problem)
        return await self._write_and_post(planned, exact, chat, target)

    async def _problem(self, answer: Answer) -> str:
        """Describe what is wrong with an answer that does not prove its prompt; `""` if it is a refusal or error for another reason."""
        if answer.status == OK:
            problem = "the hash in the engine's answer is not that of the prompt"
            self.call.note(IncidentKind.PREFIX_DIFFERS, problem)
            return problem
        if answer.status in REFUSED and MEMBER.encode() in (words := await answer.read()):
            return f"the plugin refuses a prompt by hash: {words[:300].decode(errors='replace')}"
        return ""

    def _note_proven(self, engine: Engine, exact: ExactPrompt, name: PromptName) -> None:
        self.proven = not name.echo
        if name.prefix:
            self.prefixes.noted(engine.upstream.url, hit=True)
        metrics.counter(metrics.PREFIXES, "named" if name.prefix else "whole").add(1)
        as_json = (len(exact.prefix) + len(exact.tail)) // ids.ID_BYTES * _JSON_BYTES
        sent = len(name.tail) * 4 // 3  # base64
        metrics.PREFIX_BYTES_SAVED.add(max(0, as_json * (1 if name.echo else 2) - sent))

    async def _post_images(self, planned: PlannedCall, exact: ExactPrompt | None, chat: ChatCall, target: Target) -> Answer:
        """Post a request with named images. If the engine refuses it, it may not have one of them: post it again with all pixels."""
        answer, url = await self._write_and_post(planned, exact, chat, target), planned.engine.upstream.url
        held = [image for image in target.names if image.held]
        if held and is_error(answer.status) and answer.status not in NOT_NOW:
            answer.close()
            answer = await self._write_and_post(planned, exact, chat, msgspec.structs.replace(target, names=with_pixels(target.names)))
            if answer.status == OK:
                call, words = self.call, "session %s call %s: the engine did not have %d images; they were sent again"
                log.info(words, call.session, call.id, len(held))
                metrics.IMAGES.labels("missed").inc(len(held))
                self.images.missed(url)
                held = []
        if answer.status == OK:
            self.images.answered(url, target.names, named=bool(held))
            metrics.IMAGES.labels("named").inc(len(held))
            metrics.IMAGES.labels("sent").inc(len(target.names) - len(held))
        return answer

    async def _write_and_post(self, planned: PlannedCall, exact: ExactPrompt | None, chat: ChatCall, target: Target) -> Answer:
        """Write a request and post it. After a failure the engine is probed again."""
        try:
            salt, driver, rank = planned.weights.salt, planned.engine.driver, planned.rank
            if self.exchange.body:
                request = driver.text_request(self.exchange.path, salt.written_in(self.exchange.body))
            else:
                chat = msgspec.structs.replace(chat, fields=salt.written(chat.fields)) if salt.text else chat
                if self.experts:
                    chat = request_experts(chat, planned.plan.basis.routed if exact is not None and driver.skips_experts else 0)
                request = await driver.request(chat, exact, target)
            self.request = msgspec.structs.replace(request, body=b"")  # a long stream must not keep it
            self.streams = bool(self.exchange.body) or (driver.streams and self.request.parse is None)
            self._posts += 1
            headers = with_request_id(self.exchange.headers, self.call.id, self._posts)
            self.posted = headers[REQUEST_ID]
            if driver.names_sessions:
                driver.name_session(headers, self.call.session)
            engine = planned.engine
            if rank is None or RANK_HEADER in headers:  # a rank that the client names stays, as in a direct call
                return await engine.upstream.send("POST", request.path, headers=headers, body=request.body)
            headers[RANK_HEADER] = str(rank)
            answer = await engine.upstream.send("POST", request.path, headers=headers, body=request.body)
            if answer.status not in REFUSED or not is_refused_rank(answer.status, await answer.read()):
                return answer
            answer.close()
            engine.lost_rank(rank)
            del headers[RANK_HEADER]
            return await engine.upstream.send("POST", request.path, headers=headers, body=request.body)
        except EngineError as why:
            if why.reached or why.down:
                planned.engine.forget(str(why))
            raise


def with_request_id(headers: CIMultiDict[str], call: str, post: int = 1) -> CIMultiDict[str]:
    """Give a request to an engine a unique id: two requests with the same id disturb each other in vLLM.

    The id contains the call's id, which the turn has too. A client's own id precedes it, so that it can be found in the engine's log.
    """
    own = headers.get(REQUEST_ID)
    unique = f"{call}-{post}" if post > 1 else call
    headers = headers.copy()
    headers[REQUEST_ID] = f"{own}-{unique}" if own else unique
    return headers
