"""Names of sessions in URLs and keys: what the client writes is what the proxy reads."""

import pytest

from tokencache.errors import HarnessError
from tokencache.session_url import NamedPath, check_name, check_proxy_url, session_key, session_url, split_session

PROXY = "http://proxy.example:8100/"


@pytest.mark.parametrize("name", ["r1", "a.b_c:d@e+f=g-h", "0" * 200])
@pytest.mark.parametrize("harness", ["", "claude-code"])
def test_a_url_that_the_client_writes_is_read_by_the_proxy(name, harness):
    path = session_url(PROXY, name, harness).removeprefix("http://proxy.example:8100") + "/v1/chat/completions?a=b"
    named = NamedPath.read(path)
    assert (named.session, named.harness or "", named.rest) == (name, harness, "/v1/chat/completions?a=b")
    assert named.route == "/v1/chat/completions"


def test_slashes_before_the_session_are_ignored():
    named = NamedPath.read("//s/r1/v1/models")
    assert (named.session, named.harness, named.rest) == ("r1", None, "/v1/models")


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


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:8100",
        "https://proxy.example/",
        "http://[::1]:8100",
        "HTTP://Proxy",
        "https://gate/v1/team/tokencache",
        "http://gate/s/",
    ],
)
def test_base_urls_are_accepted(url):
    assert check_proxy_url(url) == url.rstrip("/")


@pytest.mark.parametrize(
    ("url", "fault", "right"),
    [
        ("http://p:8100/v1", "'/v1' belongs to a route of the proxy", "http://p:8100"),
        ("http://p:8100/v1/", "'/v1' belongs to a route of the proxy", "http://p:8100"),
        ("http://p/s/r1/v1", "'/s/r1/v1' belongs to a route of the proxy", "http://p"),
        ("http://p/s/v1/v1", "'/s/v1/v1' belongs to a route of the proxy", "http://p"),
        ("http://p/gate/s/r1/h/codex", "'/s/r1/h/codex' belongs to a route of the proxy", "http://p/gate"),
        ("http://p/ng-rollout/r@1/training-token-capture/v1", "belongs to a route of the proxy", "http://p"),
        ("http://p/tokencache/v1", "'/tokencache/v1' belongs to a route of the proxy", "http://p"),
        ("http://p/tokencache/ui/", "'/tokencache/ui' belongs to a route of the proxy", "http://p"),
        ("localhost:8100", "it has no scheme", "http://localhost:8100"),
        ("//p:8100/s/r1/v1", "it has no scheme", "http://p:8100"),
        ("http://p/v1?a=secret", "it has a query or a fragment", "http://p"),
        ("http://me:secret@p/v1", "'/v1' belongs to a route of the proxy", "http://p"),
        ("me:secret@p:8100", "it has no scheme", "http://p:8100"),
    ],
)
def test_a_url_that_is_not_the_base_is_refused_with_the_right_one(url, fault, right):
    with pytest.raises(ValueError, match="is not the base URL of a tokencache proxy") as refused:
        check_proxy_url(url)
    assert fault in str(refused.value)
    assert str(refused.value).endswith(f" Use {right!r}.")
    assert "secret" not in str(refused.value)
    assert check_proxy_url(right) == right


@pytest.mark.parametrize(
    ("url", "fault"),
    [
        ("", "it names no host"),
        ("http://", "it names no host"),
        ("ws://p", "its scheme is 'ws', not http or https"),
        ("http://p:port", "Port could not be cast"),
        ("http://p:99999", "Port out of range"),
        ("http://p\n", "it contains a blank"),
        (" http://p", "it contains a blank"),
    ],
)
def test_a_url_that_cannot_be_repaired_is_refused_with_advice(url, fault):
    with pytest.raises(ValueError, match="is not the base URL of a tokencache proxy") as refused:
        check_proxy_url(url)
    assert fault in str(refused.value)
    assert "Name the address of `tokencache serve`, such as http://127.0.0.1:8100" in str(refused.value)
