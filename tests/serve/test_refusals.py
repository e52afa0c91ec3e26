# SPDX-License-Identifier: BSD-3-Clause
"""Calls that the server refuses. Errors name the field and have OpenAI's form, and other calls go on."""

import json

import pytest
import torch
from serving import all_free, prompts_of, run

from torch_gpukern.serve import Busy, Refused, Request

pytest.importorskip("transformers", reason="transformers is not installed")
pytest_plugins = ("serve_fixtures",)

HUGE = 2**1024  # larger than any float
NO_NUMBERS = ("1", True, [1], {"a": 1}, float("nan"), float("inf"), -float("inf"), HUGE, -HUGE)
NO_INTEGERS = ("1", True, [1], {"a": 1}, 1.5, 1.0, float("nan"), -HUGE)
FIELDS = {
    "temperature": (*NO_NUMBERS, -0.1),
    "top_p": (*NO_NUMBERS, 0, -0.1, 1.1),
    "min_p": (*NO_NUMBERS, -0.1, 1.1),
    "presence_penalty": (*NO_NUMBERS, -2.1, 2.1),
    "frequency_penalty": (*NO_NUMBERS, -2.1, 2.1),
    "repetition_penalty": (*NO_NUMBERS, 0, -1),
    "top_k": (*NO_INTEGERS, -2),
    "max_tokens": (*NO_INTEGERS, 0, -1, 100_000, HUGE),
    "n": (*NO_INTEGERS, 0, -1, 129, HUGE),
    "seed": NO_INTEGERS[:-1],
    "stop": (1, True, {"a": 1}, [1], ["a"] * 5, "", ["a", ""], [None]),
    "stream": (1, 0, "true", [True], {}),
    "stream_options": (True, {"include_usage": True}, [], {"a": 1}),
    "model": (1, True, ["tiny"], {}),
    "user": (1, True, []),
    "logit_bias": ({"5": 1}, [1], True, 1),
    "tempo": (2, "x"),
    "\ud800": (1,),
    "": (1,),
}
COMPLETIONS = {
    "prompt": (
        5,
        True,
        {},
        [],
        [[]],
        [1.5],
        [True],
        [1, "a"],
        ["a", [1]],
        [1, 512],
        [-1],
        [HUGE],
        "",
    ),
    "logprobs": (*NO_INTEGERS, -1, 21, HUGE),
    "echo": (True, 1, 0, "x"),
    "best_of": (2, True, "1"),
    "suffix": ("x", 1),
}
CHAT = {
    "messages": (
        5,
        "hi",
        {},
        [],
        ["hi"],
        [None],
        [{}],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": []}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": [{"type": "text", "text": 5}]}],
        [{"role": "user", "content": ["hi"]}],
        [{"role": "tool", "content": "hi"}],
        [{"role": ["user"], "content": "hi"}],
        [{"role": "user", "content": "hi", "tool_calls": [1]}],
        [{"role": "user", "content": "half \ud83d"}],
    ),
    "logprobs": (1, "true", [True]),
    "top_logprobs": (5,),
    "tools": ([{"type": "function"}], True, {}),
    "tool_choice": ("required", {}),
    "response_format": ({"type": "json_object"}, "text"),
    "store": (True, 0),
    "service_tier": ("flex", 1),
    "parallel_tool_calls": (1, "true"),
    "metadata": ("x", [1], True),
    "reasoning_effort": ("low",),
}


def cases(table):
    return [(name, value) for name, values in table.items() for value in values]


def refused(served, path, body, name):
    status, answer = served.post(body, path)
    error = answer["error"]
    assert status == 400 and error["type"] == "invalid_request_error", (body, answer)
    assert error["param"] == name and len(error["message"]) < 600, (body, answer)
    assert name is None or name in error["message"] or repr(name) in error["message"]


def test_completions_refuse_each_field_by_name(served):
    for name, value in cases(FIELDS | COMPLETIONS):
        param = None if name == "\ud800" else name
        if (name, value) == ("stream_options", {"include_usage": True}):
            param = "stream_options"  # it needs stream: true
        refused(served, "/v1/completions", {"prompt": "x", name: value}, param)
    assert served.post({"prompt": "x", "max_tokens": 2})[0] == 200 and all_free(served.engine)


def test_chat_refuses_each_field_by_name(chat_served):
    good = {"messages": [{"role": "user", "content": "hi"}]}
    for name, value in cases(FIELDS | CHAT):
        param = None if name == "\ud800" else name
        refused(chat_served, "/v1/chat/completions", good | {name: value}, param)
    both = good | {"max_tokens": 1, "max_completion_tokens": 1}
    refused(chat_served, "/v1/chat/completions", both, "max_tokens")
    refused(
        chat_served, "/v1/chat/completions", good | {"logprobs": True, "top_logprobs": 21},
        "top_logprobs",
    )  # fmt: skip
    assert chat_served.post(good | {"max_tokens": 2}, "/v1/chat/completions")[0] == 200


def test_fields_that_change_nothing_are_accepted(chat_served):
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    given = {"metadata": {"a": "b"}, "user": "u", "store": False, "service_tier": "auto"}
    for more in (given | {"parallel_tool_calls": True}, {"service_tier": "default"}):
        status, answer = chat_served.post(body | more, "/v1/chat/completions")
        assert status == 200, answer
    assert chat_served.post({"prompt": "x", "max_tokens": 2, "user": "u"})[0] == 200


def test_stream_options_are_looked_at_in_streams(served):
    for options in ([], {"a": 1}, {"include_usage": 1}, "x", {"include_usage": True, "b": 1}):
        body = {"prompt": "x", "stream": True, "stream_options": options}
        refused(served, "/v1/completions", body, "stream_options")


def test_null_counts_as_absent(chat_served):
    names = (*FIELDS, *COMPLETIONS)
    body = {"prompt": "x", "max_tokens": 2} | {
        name: None for name in names if name not in ("prompt", "max_tokens", "\ud800")
    }
    assert chat_served.post(body)[0] == 200
    body = {"messages": [{"role": "user", "content": "x", "name": None}], "max_tokens": 2} | {
        name: None for name in (*FIELDS, *CHAT) if name not in ("messages", "max_tokens", "\ud800")
    }
    assert chat_served.post(body, "/v1/chat/completions")[0] == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"prompt": ' + b"[" * 100_000,
        b'{"seed": 1' + b"0" * 5000 + b"}",
    ],
)
def test_what_is_no_json_says_so(served, body):
    status, answer = served.post(body)
    assert status == 400 and answer["error"]["message"].startswith("the body is not JSON: ")


@pytest.mark.parametrize("body", [b"null", b"5", b'"x"', b"[]", b"NaN"])
def test_what_is_no_object_says_so(served, body):
    refused(served, "/v1/completions", body, "body")


def test_a_lone_surrogate_says_so(served):
    for body in (
        {"prompt": "a\ud800b"},
        {"prompt": ["a", "\udfff"]},
        {"prompt": "x", "stop": ["\ud800"]},
        {"prompt": "x", "user": "\ud800"},
        {"prompt": "x", "model": "\ud800"},
    ):
        status, answer = served.post(body)
        assert status == 400 and "has a lone surrogate" in answer["error"]["message"], answer
        assert answer["error"]["param"] in body
    assert served.post({"prompt": "pair \U0001f600", "max_tokens": 1})[0] == 200


def test_a_body_that_is_too_large(served):
    assert served.post(b"x" * (5 << 20))[0] == 413


def test_an_unknown_model(served):
    status, answer = served.post({"prompt": "x", "model": "other"})
    assert status == 404 and answer["error"]["code"] == "model_not_found"
    assert answer["error"]["param"] == "model" and "'tiny'" in answer["error"]["message"]
    assert served.get("/v1/models/other")[0] == 404
    assert served.get("/v1/models/a/b")[1]["error"]["code"] == "model_not_found"
    assert served.post({"prompt": "x", "model": "tiny", "max_tokens": 1})[0] == 200


def test_unknown_paths_and_methods(served):
    for path, method, status in (
        ("/", "GET", 404),
        ("/v1/embeddings", "POST", 404),
        ("/v1/%F0%9F%98%80%ED%A0%80", "GET", 404),
        ("/v1/completions", "GET", 405),
        ("/v1/chat/completions", "DELETE", 405),
        ("/health", "POST", 405),
    ):
        answer = served.send(None, path, method)
        error = json.loads(answer.read())["error"]
        assert answer.status == status and error["type"] == "invalid_request_error"
        assert answer.getheader("content-type") == "application/json"
        assert (answer.getheader("allow") is not None) == (status == 405)


def test_a_full_queue_is_503(served):
    served.engine.max_waiting = 0
    answer = served.send({"prompt": "x"})
    error = json.loads(answer.read())["error"]
    assert answer.status == 503 and answer.getheader("retry-after") == "1"
    assert error["type"] == "server_error" and "wait already" in error["message"]


# ---- the engine by itself ------------------------------------------------------------------------


def test_the_engine_refuses_what_no_step_can_run(quick, wanted):
    """Refused requests do not change the answer of a request that is being served."""
    (prompt,) = prompts_of(20)
    kept = quick.submit(Request(prompt, max_tokens=12))
    bad = {
        name: [x for x in values if name != "max_tokens" or x is not None]
        for name, values in FIELDS.items()
        if name in Request.__dataclass_fields__
    }
    for name, value in cases(bad | {"logprobs": COMPLETIONS["logprobs"]}):
        with pytest.raises(Refused) as error:
            quick.submit(Request([1], **{name: value}))
        assert error.value.parameter == name and name in str(error.value)
    for value in (10**5000, [10**5000], torch.ones(2), None, "abc", [1.5]):
        with pytest.raises(Refused, match="prompt"):
            quick.submit(Request(value))
    with pytest.raises(Refused, match="temperature is an integer of more than 4300 digits"):
        quick.submit(Request([1], temperature=10**5000))
    with pytest.raises(Refused, match="stop_ids"):
        quick.submit(Request([1], stop_ids=frozenset([512])))
    quick.max_waiting = 2
    with pytest.raises(Busy):
        quick.submit_all([Request([1]), Request([2])])
    assert len(quick.waiting) == 1  # submit_all takes all requests or none
    run(quick)
    assert kept.answer == wanted(prompt, 12) and all_free(quick)


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1e308},
        {"temperature": 5e-324},
        {"temperature": 2**1023},
        {"temperature": 1, "top_p": 5e-324},
        {"temperature": 1, "min_p": 1},
        {"temperature": 1, "top_k": HUGE},
        {"temperature": 1, "repetition_penalty": 1e308},
        {"temperature": 1, "repetition_penalty": 5e-324},
        {"seed": HUGE},
        {"seed": -HUGE},
    ],
)
def test_values_at_the_edge_are_served(quick, wanted, settings):
    (prompt,) = prompts_of(20)
    kept = quick.submit(Request(prompt, max_tokens=6))
    edge = quick.submit(Request(prompt, max_tokens=6, **settings))
    run(quick)
    assert kept.answer == wanted(prompt, 6) and len(edge.answer) == 6 and edge.finish == "length"
