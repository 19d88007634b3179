"""Every error that a client receives has a status and a kind, and the server sends them with the error's own message."""

import pytest

from tokencache.errors import (
    BodyTooLargeError,
    EngineError,
    HarnessError,
    MemoryFullError,
    OutOfFilesError,
    SlowBodyError,
    TokencacheError,
    UnexpectedAnswerError,
    WeightsUpdatingError,
    passing_cause,
)
from tokencache.store.base import (
    CursorError,
    DamagedError,
    OutcomeConflictError,
    SessionDeletedError,
    SessionExistsError,
    SessionFinishedError,
    SessionOverError,
    SessionSealedError,
    SettingsConflictError,
    StoreError,
    StoreFullError,
)

ANSWERS = [
    (HarnessError("no", status=404, kind="not_found_error", param="model"), 404, "not_found_error", "no"),
    (SlowBodyError("slow", began=0.0), 408, "invalid_request_error", "slow"),
    (HarnessError("no"), 400, "invalid_request_error", "no"),
    (BodyTooLargeError(9), 413, "invalid_request_error", "the request body is too large: at most 9 bytes are accepted (--max-body)"),
    (EngineError("gone"), 502, "upstream_error", "gone"),
    (OutOfFilesError("no file"), 502, "upstream_error", "no file"),
    (UnexpectedAnswerError(307), 502, "upstream_error", "the engine answered 307, which is neither success nor error: check the"),
    (
        UnexpectedAnswerError(206),
        502,
        "upstream_error",
        "the engine answered 206, which is a success, but not that of a reply (200)",
    ),
    (WeightsUpdatingError("http://e:1", "t"), 503, "upstream_error", "the weights of the engine are being updated by 't'"),
    (MemoryFullError("too much"), 503, "overloaded_error", "too much"),
    (StoreError("redis: slow"), 503, "store_error", "the store failed: redis: slow"),
    (DamagedError("session r1: bad"), 503, "store_error", "the store failed: session r1: bad"),
    (SessionSealedError("r1"), 409, "session_sealed", "session r1 is sealed"),
    (SessionFinishedError("r1"), 409, "session_finished", "session r1 is finished"),
    (OutcomeConflictError("r1", "engine", "sandbox"), 409, "outcome_conflict", "session r1 has the outcome 'sandbox', which cannot become"),
    (SessionExistsError("r1"), 409, "session_exists", "session r1 exists already"),
    (SettingsConflictError("r1", ["sampling"]), 409, "settings_conflict", "session r1 exists with other settings (sampling)"),
    (CursorError("another store"), 422, "invalid_cursor", "the cursor cannot be used (another store)"),
    (SessionDeletedError("r1"), 409, "session_deleted", "session r1 was deleted"),
    (StoreFullError("9 sessions"), 503, "store_full", "accepts no new sessions: 9 sessions"),
]


@pytest.mark.parametrize(("error", "status", "kind", "message"), ANSWERS, ids=[type(row[0]).__name__ for row in ANSWERS])
def test_an_error_has_a_status_a_kind_and_a_message(error, status, kind, message):
    assert isinstance(error, TokencacheError)
    assert (error.status, error.kind) == (status, kind)
    assert message in error.client_message


def test_a_client_never_receives_the_engines_address():
    error = EngineError("the engine gave no answer", private="http://10.0.0.3:8000: reset")
    assert str(error) == "the engine gave no answer (http://10.0.0.3:8000: reset)"
    assert error.client_message == "the engine gave no answer"


def test_every_error_class_is_in_the_table():
    def below(cls):
        return {cls} | {one for child in cls.__subclasses__() for one in below(child)}

    ours = {cls for cls in below(TokencacheError) - {TokencacheError, SessionOverError} if cls.__module__.startswith("tokencache")}
    assert {type(row[0]) for row in ANSWERS} == ours


def test_a_full_store_asks_the_client_to_retry_later():
    assert StoreFullError("full").headers == {"Retry-After": "30"}
    assert TokencacheError("x").headers == {}


def test_the_engine_error_behind_another_error_is_found_if_it_may_pass():
    def caused(cause):
        error = ValueError("x")
        error.__cause__ = cause
        return error

    passing, final = EngineError("busy", status=503), EngineError("refused", status=400)
    assert passing_cause(caused(passing)) is passing
    assert passing_cause(caused(final)) is None
    assert passing_cause(caused(None)) is None
