"""What is asked again and what is not, and what is made of odd answers: without a socket, and without a pause."""

import pytest

from tokencache.client.asking import Pause, ServerResponse
from tokencache.client.errors import AnswerError, NotFoundError, UnauthorizedError, UnreachableError
from tokencache.client.exchanges import Exchanges

SILENCE = ServerResponse(0, b"ConnectError: refused")
DOWN = ServerResponse(503, b'{"error": {"message": "the store failed: gone", "type": "store_error"}}')
STATE = ServerResponse(200, b'{"session": "r", "turns": 2, "sealed": false, "complete": true, "open_calls": [], "new": {"in": "2030"}}')
GONE = ServerResponse(404, b'{"error": {"message": "there is no session \'r\'"}}')
DONE = ServerResponse(200, b'{"session": "r", "deleted": true}')

exchanges = Exchanges("http://proxy/", None)


def drive(exchange, *answers):
    """Answer an exchange's requests in turn; returns its result and what was asked."""
    asked, left = [], list(answers)
    try:
        step = next(exchange)
        while True:
            if isinstance(step, Pause):
                step = next(exchange)
            else:
                asked.append((step.method, step.path))
                step = exchange.send(left.pop(0))
    except StopIteration as done:
        assert not left
        return done.value, asked


def register():
    return exchanges.create("r", harness="", model=None, models={}, sampling={}, tenant="", budget=None, config_dir=None)


def test_what_may_be_asked_twice_is_asked_again():
    state, asked = drive(exchanges.state("r"), SILENCE, DOWN, SILENCE, STATE)
    assert state.turns == 2
    assert asked == [("GET", "/tokencache/v1/sessions/r")] * 4


def test_not_for_ever():
    with pytest.raises(UnreachableError, match=r"GET /tokencache/v1/sessions/r: no answer, tried 4 times: ConnectError: refused"):
        drive(exchanges.state("r"), *[SILENCE] * 4)
    with pytest.raises(AnswerError, match="503: the store failed: gone") as failed:
        drive(exchanges.state("r"), *[DOWN] * 4)
    assert failed.value.status == 503


def test_a_key_is_not_registered_twice():
    with pytest.raises(UnreachableError, match="tried 1 times"):
        drive(register(), SILENCE)
    with pytest.raises(AnswerError, match="503"):
        drive(register(), DOWN)


@pytest.mark.parametrize(("status", "kind"), [(401, UnauthorizedError), (404, NotFoundError), (500, AnswerError)])
def test_a_refusal_is_not_asked_again(status, kind):
    with pytest.raises(kind, match=f"{status}: no, never"):
        drive(exchanges.state("r"), ServerResponse(status, b'{"error": {"message": "no, never"}}'))


def test_a_deletion_whose_answer_was_lost():
    assert drive(exchanges.delete("r"), SILENCE, GONE)[1] == [("DELETE", "/tokencache/v1/sessions/r")] * 2
    assert drive(exchanges.delete("r"), DONE)[1] == [("DELETE", "/tokencache/v1/sessions/r")]
    with pytest.raises(NotFoundError):
        drive(exchanges.delete("r"), GONE)
    with pytest.raises(AnswerError, match="503"):
        drive(exchanges.delete("r"), *[DOWN] * 4)


@pytest.mark.parametrize("body", [b"<html>welcome</html>", b"[]", b'{"data": []}'])
def test_something_else_listens_there(body):
    with pytest.raises(AnswerError, match="GET /tokencache/v1/sessions/r: 200, but not as tokencache answers"):
        drive(exchanges.state("r"), ServerResponse(200, body))


@pytest.mark.parametrize(
    ("body", "words"), [(b"<html>no</html>", "<html>no</html>"), (b"", "Bad Gateway"), (b'{"error": "text"}', '{"error": "text"}')]
)
def test_a_refusal_in_other_words(body, words):
    with pytest.raises(AnswerError) as failed:
        drive(exchanges.state("r"), ServerResponse(502, body))
    assert str(failed.value) == f"GET /tokencache/v1/sessions/r: 502: {words}"
    assert failed.value.status == 502


def test_names_stay_within_their_place_in_the_path():
    _, asked = drive(exchanges.state("a/../b?c"), STATE)
    assert asked == [("GET", "/tokencache/v1/sessions/a%2F..%2Fb%3Fc")]
