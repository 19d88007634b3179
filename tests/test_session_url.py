"""Names of sessions in URLs and keys: what the client writes is what the proxy reads."""

import pytest

from tokencache.errors import HarnessError
from tokencache.session_url import check_name, route_of, session_key, session_url, split_harness, split_session

PROXY = "http://proxy.example:8100/"


@pytest.mark.parametrize("name", ["r1", "a.b_c:d@e+f=g-h", "0" * 200])
@pytest.mark.parametrize("harness", ["", "claude-code"])
def test_a_url_that_the_client_writes_is_read_by_the_proxy(name, harness):
    path = session_url(PROXY, name, harness).removeprefix("http://proxy.example:8100") + "/v1/chat/completions?a=b"
    session, rest = split_session(path)
    found, route = split_harness(rest)
    assert (session, found or "", route) == (name, harness, "/v1/chat/completions?a=b")
    assert route_of(path) == "/v1/chat/completions"


def test_nemo_gyms_paths_name_the_session_too():
    for capture in ("", "/training-token-capture"):
        assert split_session(f"/ng-rollout/r1{capture}/v1/models") == ("r1", "/v1/models")
    assert split_session("/v1/models") == (None, "/v1/models")
    assert split_session("/s/r1") == ("r1", "/")


def test_a_key_names_its_session():
    assert session_key("r1") == "tcs-r1"


@pytest.mark.parametrize("name", ["", "-a", "a/b", "a b", "é", "a" * 201, "a\n"])
def test_an_invalid_name_is_refused(name):
    with pytest.raises(HarnessError, match="not a valid session name"):
        check_name(name)
