"""What a consumer makes of CloudEvents, without a broker."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox.inbox.cloudevents import attribute, opened
from outbox.inbox.message import Message, read
from outbox.publishers.cloudevents import CONTENT_TYPE, structured
from tests.rows import outgoing

START = b'{"specversion":"1.0","id":"1","source":"/s","type":"t"'


def received(body: bytes, content_type: str = "Application/CloudEvents+JSON; charset=utf-8", **headers: object) -> Message:
    return read(body, headers, {}, content_type=content_type, routing_key="orders.placed", redelivered=False)


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b"{}", b"[1]", b"\xff", b'{"a"', b'{"a":', b'{"a":1', b'{"a" 1}', b'{"a":1 "b":2}', b"{1:2}",
        b'{"specversion":"1.0"}', START.replace(b"1.0", b"0.3") + b"}", START.replace(b'"1"', b'""') + b"}", START + b"} more",
        START + b',"data_base64":"?"}', START + b',"data":1,}', START + b',"data":}', b'{"a":' + b"[" * 100_000,
        START + b',"data":' + b"[" * 100_000 + b"]" * 100_000 + b"}", START + b',"data_base64":7}', START + b',"datacontenttype":7,"data":"x"}', START.replace(b'"id"', b"7") + b"}",
    ],
    ids=lambda body: str(body[:80]),
)  # fmt: skip
def test_what_only_claims_to_be_a_structured_event_is_left_as_it_is(body):
    message = received(body)
    assert (message.message_id, message.payload) == ("", body)
    assert message.content_type == "Application/CloudEvents+JSON; charset=utf-8"


@pytest.mark.parametrize(
    "content_type", ["application/json", "application/cloudevents-batch+json", "application/cloudevents+avro", None]
)
def test_only_one_event_in_json_is_opened(content_type):
    assert opened({}, content_type, START + b"}").payload == START + b"}"


@pytest.mark.parametrize(
    ("members", "content_type", "payload"),
    [
        (b"", None, b""),
        (b',"datacontenttype":"text/plain"', "text/plain", b""),
        (b',"data":null', "application/json", b"null"),
        (b' , "data" : { "a" : 1.50 } , "z":1', "application/json", b'{ "a" : 1.50 }'),
        (b',"data":"x","datacontenttype":"text/json+json"', "text/json+json", b'"x"'),
        (b',"data":"<a n=\\"1\\"/>","datacontenttype":"text/xml"', "text/xml", b'<a n="1"/>'),
        (b',"data":{"a":1},"datacontenttype":"text/xml"', "text/xml", b'{"a":1}'),
        (b',"data_base64":"AP8="', None, b"\x00\xff"),
        (b',"data_base64":""', None, b""),
        (b',"data_base64":null,"subject":null', None, b""),
        (b',"data":' + b"9" * 5000, "application/json", b"9" * 5000),
    ],
    ids=lambda value: str(value)[:60],
)
def test_the_payload_is_what_stands_in_the_event(members, content_type, payload):
    message = received(b" \n" + START + members + b" } \n")
    assert (message.payload, message.content_type, message.message_id, message.type) == (payload, content_type, "/s 1", "t")


def test_attributes_become_headers_and_replace_none():
    message = received(START + b',"n":5,"ok":true}', cloudEvents_source="said before", own=1)
    assert message.headers == {
        "cloudEvents_specversion": "1.0", "cloudEvents_id": "1", "cloudEvents_type": "t", "cloudEvents_n": 5, "cloudEvents_ok": True,
        "cloudEvents_source": "said before", "own": 1,
    }  # fmt: skip


@pytest.mark.parametrize("prefix", ["cloudEvents_", "cloudEvents:", "ce-", "ce_"])
@pytest.mark.parametrize("value", ["Paid", b"Paid"])
def test_an_attribute_is_found_in_every_binding(prefix, value):
    assert attribute({f"{prefix}type": value}, "type") == "Paid"
    assert attribute({f"{prefix}other": value}, "type") is None


def test_our_own_header_says_the_key():
    headers = {"outbox-key": "ours", "cloudEvents_partitionkey": "theirs"}
    assert received(b"{}", "application/json", **headers).key == "ours"


JSON = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.integers() | st.text(), st.lists
)


@given(payload=st.binary(max_size=40) | JSON.map(lambda value: json.dumps(value).encode()), key=st.none() | st.text(min_size=1))
def test_every_payload_comes_out_as_it_went_in_and_the_event_is_json(payload, key):
    key = key if key is None or key.encode(errors="ignore").decode() == key else None
    row = outgoing(payload=payload, key=key)
    body = structured(row, "/shop")
    json.loads(body)
    message = received(body, CONTENT_TYPE)
    assert (message.payload, message.content_type, message.message_id) == (payload, "application/json", f"/shop {row.message_id}")
