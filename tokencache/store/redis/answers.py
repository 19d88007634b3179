"""Checks the answers of Redis: each script and each command has one form of answer, and another one is an error of the store.

A server that answers something else is not the expected one, such as a proxy before Redis that is broken, or a connection is out of step.
What it says must not become a secret, a turn or a success.
"""

import re
from collections.abc import Callable
from typing import Any

from redis import exceptions

from tokencache.store.base import SECRET_BYTES
from tokencache.store.redis import queue_scripts, scripts

Form = tuple[str, Callable[[Any], bool]]
"""A form in words, and whether an answer has it."""


class WrongAnswerError(exceptions.RedisError):
    """The answer to a script or command does not have its form. The message shows no content, which may be that of another session."""


def _is_string(answer: Any) -> bool:
    return isinstance(answer, bytes)


def _is_list(answer: Any, item: Callable[[Any], bool] = _is_string) -> bool:
    return isinstance(answer, list) and all(map(item, answer))


def _is_optional(answer: Any) -> bool:
    return answer is None or isinstance(answer, bytes)


def _is_count(answer: Any) -> bool:
    return type(answer) is int and answer >= 0


def _are_hits(answer: Any) -> bool:
    if not isinstance(answer, list) or [*map(type, answer)] != [int, bytes] * (len(answer) // 2):
        return False
    return min(answer[::2], default=0) >= 0


def _is_begun(answer: Any) -> bool:
    if not isinstance(answer, list):
        return False
    head = len(answer) >= _BEGUN and (*map(type, answer[:_BEGUN]),) == (bytes, int, int, bytes, bytes, bytes)
    return (head and _are_hits(answer[_BEGUN:])) or (len(answer) == 1 and _is_string(answer[0]))


def _is_pair(answer: Any, first: Callable[[Any], bool]) -> bool:
    return isinstance(answer, list | tuple) and [*map(type, answer)][1:] == [list] and first(answer[0]) and _is_list(answer[1])


def _is_cut(answer: Any) -> bool:
    return _is_string(answer) and re.fullmatch(rb"[01] \d{1,9}", answer) is not None


def _is_epoch(answer: Any) -> bool:
    return _is_string(answer) and re.fullmatch(rb"[0-9a-f]{16}", answer) is not None


def _is_media(answer: Any) -> bool:
    return answer == [] or (_is_list(answer, item=_is_optional) and len(answer) in {1, 2} and _is_string(answer[0]))


def _number(*allowed: int) -> Form:
    return f"one of the numbers {', '.join(map(str, allowed))}", lambda answer: type(answer) is int and answer in allowed


def _or_number(form: Form, *allowed: int) -> Form:
    words, _ = _number(*allowed)
    return f"{form[0]}, or {words}", lambda answer: (type(answer) is int and answer in allowed) or form[1](answer)


def _of_its_call(form: Form) -> Form:
    words, fits = form

    def fits_with_name(answer: Any) -> bool:
        return isinstance(answer, list) and [*map(type, answer[:1])] == [bytes] and len(answer[1:]) == 1 and fits(answer[1])

    return f"the name of the call, and {words}", fits_with_name


_BEGUN, _STATE = 6, 20
"""Lengths of the fixed parts of the answers of BEGIN and SESSION."""
_STRING: Form = "a string", _is_string
_OPTIONAL: Form = "a string or nothing", _is_optional
_STRINGS: Form = "a list of strings", _is_list
_OPTIONALS: Form = "a list of strings or nothing", lambda answer: _is_list(answer, item=_is_optional)
_COUNT: Form = "a number", _is_count
_OK: Form = "OK", lambda answer: answer is True
_YES_NO = _number(0, 1)
_ONE_STRING: Form = "a list of one string", lambda answer: _is_list(answer) and len(answer) == 1
_OTHER_OUTCOME: Form = "another outcome", lambda answer: _is_list(answer) and answer[:-1] == [b"outcome"]
_MAY_BE_EMPTY: Form = "an empty list, or one of one string", lambda answer: _is_list(answer) and len(answer) <= 1

FORMS: dict[str, Form] = {
    **dict.fromkeys((scripts.MARK_ORPHANED, scripts.MARK_WANTED, scripts.ADD_INCIDENTS, scripts.SET_LABELS, scripts.ADD_REWARD), _YES_NO),
    **dict.fromkeys((scripts.JOIN_SHARED, scripts.KEEP_SHARED, scripts.DELETE_DOCUMENT, scripts.REPLACE_WEIGHTS), _YES_NO),
    **dict.fromkeys((queue_scripts.OFFER, queue_scripts.LEASE, queue_scripts.EXTEND, queue_scripts.RELEASE), _YES_NO),
    **dict.fromkeys((queue_scripts.WITHDRAW, queue_scripts.WATCH, queue_scripts.UNWATCH), _number(1)),
    **dict.fromkeys((scripts.PREFIX, scripts.TURNS, scripts.CONTEXTS, scripts.REWARDS, scripts.SHARE, "HVALS"), _STRINGS),
    **dict.fromkeys(("UNLINK", "HSET", "HDEL", "HLEN", "DBSIZE"), _COUNT),
    scripts.CHECK_SCHEMA: _STRING,
    scripts.SET_ONCE: (f"{SECRET_BYTES} bytes", lambda answer: _is_string(answer) and len(answer) == SECRET_BYTES),
    scripts.DEFINE: _or_number(_ONE_STRING, scripts.CREATED, scripts.JOINED, scripts.EXISTS, scripts.NO_CAPACITY),
    scripts.SETTINGS: _MAY_BE_EMPTY,
    scripts.BEGIN: _of_its_call(
        _or_number(("a call that began", _is_begun), scripts.SEALED, scripts.DELETED, scripts.FULL, scripts.FINISHED)
    ),
    scripts.FIND: ("pairs of a number and a string", _are_hits),
    scripts.COMMIT: _of_its_call(_number(scripts.LOST, scripts.ENDED, scripts.TURN_LOST, scripts.WAS_DELETED)),
    scripts.SESSION: (
        "an empty list, or the state of a session",
        lambda answer: _is_list(answer, item=_is_optional) and (not answer or len(answer) >= _STATE),
    ),
    scripts.TOKENS: ("pairs of strings", lambda answer: _is_list(answer) and len(answer) % 2 == 0),
    scripts.FINISH: _or_number(_OTHER_OUTCOME, 0, 1),
    scripts.SEAL: _or_number(("what would be cut off", _is_cut), 0, 1),
    scripts.DELETE: _or_number(("an epoch", _is_epoch), 0, 1),
    scripts.DOCUMENTS: _OPTIONALS,
    scripts.PUT_MEDIA: _number(scripts.OVER_LIMIT, scripts.STORED, scripts.NO_SESSION),
    scripts.MEDIA: ("an empty list, or the list of media and one of them", _is_media),
    queue_scripts.READ_QUEUE: ("the time and the entries of the queue", lambda answer: _is_pair(answer, _is_string)),
    queue_scripts.REMOVE: _number(queue_scripts.REMOVED, queue_scripts.REPEATED, queue_scripts.EXPIRED),
    queue_scripts.OVERDUE: ("the time and a list of strings", lambda answer: _is_pair(answer, _is_string)),
    "SET": _OK,
    "GETEX": _OPTIONAL,
    "MGET": _OPTIONALS,
    "HGET": _OPTIONAL,
    "TIME": ("seconds and microseconds", lambda answer: isinstance(answer, tuple) and [*map(type, answer)] == [int, int]),
    "SCAN": ("a cursor and a list of keys", lambda answer: _is_pair(answer, _is_count)),
    "INFO": ("a report", lambda answer: isinstance(answer, dict)),
}
"""The form of the answer to each script and each command, as the client library returns it."""


def check(sent: str, answer: Any) -> Any:
    """Return the answer to a script or a command if it has its form. Raises `WrongAnswerError` if it has another one."""
    form, fits = FORMS[sent]
    if not fits(answer):
        raise WrongAnswerError(f"the server answered something else than {form}: {_kind(answer)}")
    return answer


def _kind(answer: Any) -> str:
    size = f" of {len(answer)}" if isinstance(answer, bytes | list | tuple | dict) else ""
    return "nothing" if answer is None else f"{type(answer).__name__}{size}"
