"""Whatever a secret is and wherever it stands, what is shown of it is ***."""

import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.secrets import hidden, hidden_override, without_secrets

# What stands in an address as it is (RFC 3986): unreserved characters, and the sub-delimiters of its part.
UNRESERVED = string.ascii_letters + string.digits + "-._~%"
PASSWORDS = st.text(UNRESERVED + "!$&'()*+,;=:@", min_size=1).map(lambda text: f"hunter2{text}hunter2")
VALUES = st.text(UNRESERVED + "!$'()*+,=:@/?", min_size=1).map(lambda text: f"hunter2{text}hunter2")
NAMES = "password token access_token api_key apikey key secret client_secret aws_secret_access_key pwd signature sig"
AMAZONS = "AWSAccessKeyId X-Amz-Signature X-Amz-Credential X-Amz-Security-Token"
PARAMETERS = st.sampled_from(f"{NAMES} {AMAZONS}".split())
SCHEMES = st.sampled_from(["redis", "rediss", "unix", "s3", "https", "s3+https"])
AROUND = st.sampled_from(
    ["{}", "url={}", "'{}'", '"{}"', "({})", "{} and more", "cannot reach {}: refused", "<{}>", "[{}]"]
)


@settings(deadline=None)
@given(SCHEMES, st.sampled_from(["", "me", "me%40home"]), PASSWORDS, AROUND)
def test_no_password_of_an_address_is_shown(scheme, user, password, around):
    shown = without_secrets(around.format(f"{scheme}://{user}:{password}@host:6379/0?db=1"))
    assert "hunter2" not in shown
    assert "host:6379/0?db=1" in shown


@settings(deadline=None)
@given(SCHEMES, PARAMETERS, VALUES, st.sampled_from(["?{}", "?db=1&{}", "?{}&db=1", "?a=b;{}"]), AROUND)
def test_no_secret_of_a_query_is_shown(scheme, parameter, value, query, around):
    shown = without_secrets(around.format(f"{scheme}://host/path{query.format(f'{parameter}={value}')}"))
    assert "hunter2" not in shown
    assert f"{scheme}://host/path?" in shown


@settings(deadline=None)
@given(st.sampled_from(["token", "password", "api_key", "redis_password", "secret"]), st.text(), AROUND)
def test_no_secret_of_a_printed_object_is_shown(name, value, around):
    value = f"hunter2{value}"
    for printed in (f"{name}={value!r}", f"{{{name!r}: {value!r}}}", f'{{"{name}": {value!r}, "n": 1}}'):
        assert "hunter2" not in without_secrets(around.format(printed))


@settings(deadline=None)
@given(st.text(UNRESERVED + "+/=", min_size=8), st.sampled_from(["Bearer", "bearer", "Basic"]), AROUND)
def test_no_header_is_shown(token, kind, around):
    shown = without_secrets(around.format(f"authorization: {kind} hunter2{token}"))
    assert "hunter2" not in shown


@settings(deadline=None)
@given(
    st.recursive(
        st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["a", "token", "b"]), inner)
    ),
    PASSWORDS,
)
def test_no_secret_of_a_tree_is_shown_and_all_else_stays(tree, password):
    planted = {
        "kept": "as it is",
        "tree": tree,
        "password": tree,
        "more": [f"redis://:{password}@h", {"token": password}],
    }
    shown = hidden(planted)
    assert "hunter2" not in str(shown)
    assert shown["kept"] == "as it is"
    assert shown["password"] == "***"


@settings(deadline=None)
@given(PASSWORDS, VALUES)
def test_no_override_shows_one(password, value):
    for override in (
        f"redis.url=redis://:{password}@h/0",
        f"redis.url=redis://h/0?password={value}",
        f"trainer.server.token={password}",
    ):
        assert "hunter2" not in hidden_override(override)


@pytest.mark.parametrize(
    "text",
    [
        "step 3 of 10: 128 tokens, keys: 4",
        "sampling.max_tokens is 0, expected at least 1",
        "expected the metadata authorization: Bearer <token>",
        "https://host/path?page=2&sort=name#part",
        "mail me@host or see docs/rewards.md",
        "trainer.server.token is missing",
    ],
)
def test_what_is_no_secret_stays(text):
    assert without_secrets(text) == text
