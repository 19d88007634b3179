"""Which requests are repeated, and how unusual responses are read. Opens no socket and does not wait."""

import json

import numpy as np
import pytest

from tokencache.client import protocol
from tokencache.client.access import access_to
from tokencache.client.collecting import OUTAGE_SECONDS, as_completed, follow, iterate
from tokencache.client.errors import (
    AnswerError,
    InvalidUrlError,
    NotFoundError,
    RefusedError,
    UnauthorizedError,
    UnreachableError,
    WrongServerError,
)
from tokencache.client.operations import ProxyAddress, SessionOptions, create, sessions
from tokencache.client.protocol import Item, Pause, ServerResponse
from tokencache.client.session_operations import delete, finish, label, set_reward, state
from tokencache.core.session import NewSession
from tokencache.trajectories.lengths import ExportOptions, ExportParameters

NO_RESPONSE = ServerResponse(0, b"ConnectError: refused")
DOWN = ServerResponse(503, b'{"error": {"message": "the store failed: gone", "type": "store_error"}}')
STATE = ServerResponse(200, b'{"session": "r", "turns": 2, "sealed": false, "complete": true, "open_calls": [], "new": {"in": "2030"}}')
GONE = ServerResponse(404, b'{"error": {"message": "there is no session \'r\'", "type": "not_found_error", "param": null, "code": 404}}')
DONE = ServerResponse(200, b'{"session": "r", "deleted": true}')

PROXY = ProxyAddress("http://proxy/", None)
SESSION = access_to(PROXY.url, "r")


def drive(steps, *responses):
    """Answer the requests of an operation in turn. Returns its result and the requests."""
    asked, left = [], list(responses)
    try:
        step = next(steps)
        while True:
            if isinstance(step, Pause):
                step = next(steps)
            else:
                asked.append((step.method, step.path))
                step = steps.send(left.pop(0))
    except StopIteration as done:
        assert not left
        return done.value, asked


class Clock:
    """A proxy whose clock is moved by pauses only. It answers requests while it is up."""

    def __init__(self, monkeypatch, up):
        self.now, self.asked, self._up = 0.0, [], up
        monkeypatch.setattr(protocol.time, "monotonic", lambda: self.now)

    def run(self, steps, most=2):
        """Run an operation. Returns its first results, `most` at most."""
        found = []
        try:
            step = next(steps)
            while len(found) < most:
                if isinstance(step, Item):
                    found.append(step.value)
                    step = next(steps)
                elif isinstance(step, Pause):
                    self.now += step.seconds
                    step = next(steps)
                else:
                    self.asked.append(step.path)
                    up = self._up(self.now, len(self.asked))
                    step = steps.send(self._answer(step) if up else NO_RESPONSE if len(self.asked) % 2 else DOWN)
        except StopIteration:
            pass
        return found

    def _answer(self, request):
        """All sessions are finished. One that is waited for or taken comes alone."""
        finished = {"session": "r1", "turns": 2, "sealed": False, "complete": True, "open_calls": [], "state": "finished"}
        if request.path.endswith("/wait"):
            answer = {"finished": [{**finished, "session": json.loads(request.body)["sessions"][0]}]}
        elif request.path.endswith("/queue/take"):
            answer = {"deliveries": [{"id": "d", "group": "", "attempt": 1, "until": 1.0, "sessions": [finished]}]}
        else:
            answer = {**finished, "outputs": []}
        return ServerResponse(200, json.dumps(answer).encode())


OPERATIONS = {
    "follow": lambda: follow(PROXY, "trainer", format="verl"),
    "as_completed": lambda: as_completed(PROXY, ["r1", "r2"], format="verl"),
    "iterate": lambda: iterate(PROXY, ["r1", "r2"], format="verl", timeout=1000.0),
}


def test_a_consumer_goes_on_if_a_session_is_deleted_after_it_was_taken():
    """What remains of its group goes back: another session may make it whole."""
    members = [{"session": name, "turns": 2, "sealed": True, "complete": True, "open_calls": []} for name in ("r1", "r2")]
    taken = [{"id": name, "group": "g", "attempt": 1, "until": 1.0, "sessions": members} for name in ("d1", "d2")]
    answers = iter([{"deliveries": taken}, {"outputs": []}, GONE, {"released": ["d1"]}, {"outputs": []}, {"outputs": []}])
    asked, steps = [], follow(PROXY, "trainer", group_size=2, format="verl")
    step = next(steps)
    while not isinstance(step, Item):
        asked.append((step.path.rpartition("/")[2], json.loads(step.body or "{}").get("deliveries")))
        answer = next(answers)
        step = steps.send(answer if isinstance(answer, ServerResponse) else ServerResponse(200, json.dumps(answer).encode()))
    fetched = [("trajectories", None)] * 2
    assert (step.value.id, asked) == ("d2", [("take", None), *fetched, ("release", ["d1"]), *fetched])


def page_of(name, cursor=None):
    state = {"session": name, "turns": 2, "sealed": False, "complete": True, "open_calls": []}
    return ServerResponse(200, json.dumps({"sessions": [state], "cursor": cursor}).encode())


def test_sessions_are_listed_again_if_the_store_refuses_a_cursor():
    refusal = {"error": {"message": "another server has taken over", "type": "invalid_cursor", "param": "cursor", "code": 422}}
    refused = ServerResponse(422, json.dumps(refusal).encode())
    found, asked = drive(sessions(PROXY), page_of("r1", "c"), page_of("r2", "d"), refused, page_of("r2", "e"), page_of("r3"))
    assert ([one.session for one in found], len(asked)) == (["r2", "r3"], 5)
    with pytest.raises(RefusedError, match="another server"):
        drive(sessions(PROXY), *[page_of("r1", "c"), refused] * 3)
    with pytest.raises(RefusedError, match="another server"):
        drive(sessions(PROXY), refused)


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_trainer_waits_for_a_proxy_that_is_restarted(monkeypatch, name):
    proxy = Clock(monkeypatch, lambda now, asked: asked == 1 or now > OUTAGE_SECONDS - 10)
    assert len(proxy.run(OPERATIONS[name]())) == 2
    assert proxy.now < OUTAGE_SECONDS


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_outage_that_takes_too_long_is_an_error(monkeypatch, name):
    proxy = Clock(monkeypatch, lambda now, asked: asked == 1)
    with pytest.raises((UnreachableError, AnswerError)):
        proxy.run(OPERATIONS[name]())
    assert OUTAGE_SECONDS < proxy.now < OUTAGE_SECONDS + 10


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_proxy_that_never_responded_is_not_waited_for(monkeypatch, name):
    proxy = Clock(monkeypatch, lambda now, asked: False)
    with pytest.raises((UnreachableError, AnswerError)):
        proxy.run(OPERATIONS[name]())
    assert len(proxy.asked) == 4


def test_a_shorter_timeout_ends_an_outage(monkeypatch):
    proxy = Clock(monkeypatch, lambda now, asked: asked == 1)
    with pytest.raises((UnreachableError, AnswerError)):
        proxy.run(follow(PROXY, "trainer", format="verl", timeout=20.0))
    assert 20 < proxy.now < 30


def register():
    return create(PROXY, "r")


def test_a_repeatable_request_is_repeated():
    found, asked = drive(state(SESSION), NO_RESPONSE, DOWN, NO_RESPONSE, STATE)
    assert found.turns == 2
    assert asked == [("GET", "/tokencache/v1/sessions/r")] * 4


def test_a_request_is_repeated_three_times_at_most():
    with pytest.raises(UnreachableError, match=r"GET /tokencache/v1/sessions/r: no answer, tried 4 times: ConnectError: refused"):
        drive(state(SESSION), *[NO_RESPONSE] * 4)
    with pytest.raises(AnswerError, match="503: the store failed: gone") as failed:
        drive(state(SESSION), *[DOWN] * 4)
    assert failed.value.status == 503


def test_a_key_is_not_registered_twice():
    with pytest.raises(UnreachableError, match="no answer: "):
        drive(register(), NO_RESPONSE)
    with pytest.raises(AnswerError, match="503"):
        drive(register(), DOWN)


@pytest.mark.parametrize(("status", "kind"), [(401, UnauthorizedError), (404, NotFoundError), (500, AnswerError)])
def test_a_refused_request_is_not_repeated(status, kind):
    body = b'{"error": {"message": "no, never", "type": "not_found_error", "param": null, "code": %d}}' % status
    with pytest.raises(kind, match=f"{status}: no, never"):
        drive(state(SESSION), ServerResponse(status, body))


def test_a_deletion_whose_response_was_lost():
    assert drive(delete(SESSION), NO_RESPONSE, GONE)[1] == [("DELETE", "/tokencache/v1/sessions/r")] * 2
    assert drive(delete(SESSION), DONE)[1] == [("DELETE", "/tokencache/v1/sessions/r")]
    with pytest.raises(NotFoundError):
        drive(delete(SESSION), GONE)
    with pytest.raises(AnswerError, match="503"):
        drive(delete(SESSION), *[DOWN] * 4)


@pytest.mark.parametrize("body", [b"<html>welcome</html>", b"[]", b'{"data": []}'])
def test_another_program_at_the_address(body):
    words = "GET /tokencache/v1/sessions/r: status 200, but the body is not a response of tokencache.*http://other:80.*Name the address of"
    with pytest.raises(WrongServerError, match=words):
        drive(state(SESSION), ServerResponse(200, body, "http://other:80"))


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (404, b'{"error":{"message":"Not Found","type":"NotFoundError","param":null,"code":404}}'),  # vLLM 0.27
        (404, b'{"detail":"Not Found"}'),  # FastAPI
        (404, b'{"error":{"code":404,"message":"File Not Found","type":"not_found_error"}}'),  # llama.cpp
        (405, b"<html>"),
        (501, b""),
    ],
)
def test_another_server_refuses_the_path(status, body):
    """Never a `NotFoundError`, which `iterate` and `delete` take for a session that is gone."""
    with pytest.raises(
        WrongServerError, match=f"http://engine is not a tokencache proxy: it answered {status}.*Name the address of"
    ) as failed:
        drive(state(SESSION), ServerResponse(status, body, "http://engine"))
    assert not isinstance(failed.value, NotFoundError)
    assert failed.value.status == status
    with pytest.raises(WrongServerError):
        drive(delete(SESSION), NO_RESPONSE, ServerResponse(status, body))


def test_a_redirection_names_where_it_leads():
    with pytest.raises(WrongServerError, match="http://gate is not a tokencache proxy: it answered 308: redirects to https://gate/x"):
        drive(state(SESSION), ServerResponse(308, b"", "http://gate", "https://gate/x"))


def test_a_wrong_url_is_refused_before_a_request():
    with pytest.raises(InvalidUrlError, match=r"'http://proxy/v1' is not the base URL.*Use 'http://proxy'\.") as failed:
        ProxyAddress("http://proxy/v1", None)
    assert isinstance(failed.value, ValueError)


@pytest.mark.parametrize(
    ("body", "words"), [(b"<html>no</html>", "<html>no</html>"), (b"", "Bad Gateway"), (b'{"error": "text"}', '{"error": "text"}')]
)
def test_an_error_body_in_another_shape(body, words):
    with pytest.raises(AnswerError) as failed:
        drive(state(SESSION), ServerResponse(502, body))
    assert str(failed.value) == f"GET /tokencache/v1/sessions/r: 502: {words}"
    assert failed.value.status == 502


def test_names_are_quoted_in_the_path():
    _, asked = drive(state(access_to(PROXY.url, "a/../b?c")), STATE)
    assert asked == [("GET", "/tokencache/v1/sessions/a%2F..%2Fb%3Fc")]


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_a_reward_that_is_not_finite_is_not_sent(number):
    """JSON would have `null` in its place, which means that there is no reward."""
    for steps in (
        finish(SESSION, number),
        finish(SESSION, components={"tests": number}),
        set_reward(SESSION, number),
        set_reward(SESSION, None, turns={"t": number}),
    ):
        with pytest.raises(ValueError, match="is not a finite number"):
            drive(steps)
    with pytest.raises(ValueError, match="not JSON compliant"):
        drive(finish(SESSION, metadata={"seed": number}))


def test_a_reward_may_be_a_number_of_numpy():
    given = finish(SESSION, np.float32(0.5)), set_reward(SESSION, np.float32(0.5)), set_reward(SESSION, None)
    assert [json.loads(next(steps).body)["reward"] for steps in given] == [0.5, 0.5, None]


def test_tags_are_not_the_characters_of_a_string():
    for steps in (create(PROXY, "r", tags="run:7"), finish(SESSION, 1.0, tags="run:7"), label(SESSION, tags="run:7")):
        with pytest.raises(TypeError, match=r"For one tag write \['run:7'\]"):
            drive(steps)


def test_an_option_that_is_not_known_is_refused():
    """It would have no effect, and nobody would notice that a rollout samples otherwise, or that groups have another size."""
    with pytest.raises(TypeError, match="unexpected keyword argument 'temperature'"):
        drive(create(PROXY, "r", temperature=0.5))
    with pytest.raises(TypeError, match="unexpected keyword argument 'groupsize'"):
        follow(PROXY, "c", groupsize=4)


def test_the_typed_options_are_those_of_the_requests():
    own = {"model", "config_dir", "wait"}  # these never reach the proxy
    assert SessionOptions.__annotations__.keys() - own == set(NewSession.__struct_fields__) - {"session"}
    assert ExportOptions.__annotations__.keys() == set(ExportParameters.__struct_fields__)
