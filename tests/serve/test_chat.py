# SPDX-License-Identifier: BSD-3-Clause
"""Chat completions: the tokenizer's template, and the forms of answers, streams and logprobs."""

import pytest

from torch_gpukern.serve import Refused, Request
from torch_gpukern.serve.tokenizer import Tokenizer

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("jinja2", reason="jinja2 is not installed")
pytest_plugins = ("serve_fixtures",)

PATH = "/v1/chat/completions"
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "nai"}, {"type": "text", "text": "ve"}]},
]
ASKED = "<|system|>Be brief.\n<|user|>naive\n<|assistant|>"


@pytest.fixture
def tokenizer(model_dir):
    from transformers import AutoTokenizer

    return Tokenizer(AutoTokenizer.from_pretrained(model_dir))


def test_the_template_makes_the_prompt(chat_served, tokenizer, wanted):
    prompt = tokenizer.encode(ASKED)
    want = tokenizer.decode(wanted(prompt, 12))
    body = {"messages": TALK, "max_tokens": 12, "temperature": 0}
    status, answer = chat_served.post(body, PATH)
    assert status == 200 and answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-") and answer["model"] == "tiny"
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": want, "refusal": None}
    assert choice["finish_reason"] == "length" and choice["logprobs"] is None
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    newer = {"messages": [TALK[0] | {"role": "developer"}, TALK[1]], "temperature": 0}
    _, same = chat_served.post(newer | {"max_completion_tokens": 12, "max_tokens": None}, PATH)
    assert same["choices"] == answer["choices"]


def test_a_stream_begins_with_the_role(chat_served, tokenizer, wanted):
    body = {"messages": TALK, "max_tokens": 12, "temperature": 0, "n": 2}
    *parts, usage = chat_served.stream(body | {"stream_options": {"include_usage": True}}, PATH)
    assert {part["object"] for part in [*parts, usage]} == {"chat.completion.chunk"}
    assert len({part["id"] for part in parts}) == 1
    for i in range(2):
        mine = [c for part in parts for c in part["choices"] if c["index"] == i]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        text = "".join(c["delta"].get("content", "") for c in mine)
        assert text == tokenizer.decode(wanted(tokenizer.encode(ASKED), 12))
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["length"]
        assert mine[-1]["finish_reason"] == "length"
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 24


def test_logprobs_of_chat(chat_served, tokenizer):
    body = {"messages": TALK, "max_tokens": 8, "temperature": 1, "seed": 5, "logprobs": True}
    for top in (None, 0, 2):
        _, answer = chat_served.post(body | {"top_logprobs": top}, PATH)
        (choice,) = answer["choices"]
        content = choice["logprobs"]["content"]
        assert len(content) == answer["usage"]["completion_tokens"] == 8
        for entry in content:
            assert entry.keys() == {"token", "logprob", "bytes", "top_logprobs"}
            assert entry["logprob"] <= 0 and len(entry["top_logprobs"]) == (top or 0)
            if "\ufffd" in entry["token"]:  # a part of a character
                assert entry["bytes"] is None
            else:
                assert bytes(entry["bytes"]).decode() == entry["token"]
            best = [x["logprob"] for x in entry["top_logprobs"]]
            assert best == sorted(best, reverse=True)
    parts = chat_served.stream(body | {"top_logprobs": 2}, PATH)
    streamed = [c["logprobs"]["content"] for p in parts for c in p["choices"] if c["logprobs"]]
    assert [entry for part in streamed for entry in part] == content


def test_without_max_tokens_an_answer_may_fill_the_context(chat_served):
    """64 pages of 16 tokens are the context here."""
    body = {"messages": TALK, "temperature": 0, "stop": None}
    _, answer = chat_served.post(body, PATH)
    assert answer["usage"]["total_tokens"] == 64 * 16
    assert answer["choices"][0]["finish_reason"] == "length"


def test_no_template_is_refused_by_name(served, tokenizer):
    status, answer = served.post({"messages": TALK}, PATH)
    assert status == 400 and "no chat template" in answer["error"]["message"]
    tokenizer.inner.chat_template = None
    with pytest.raises(Refused, match="has no chat template; use POST /v1/completions"):
        tokenizer.chat(TALK)


def test_what_a_template_refuses_is_a_400(tokenizer):
    tokenizer.inner.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(Refused, match="the chat template refuses: roles must alternate"):
        tokenizer.chat(TALK)


def test_an_end_token_is_no_text(chat_served, tokenizer):
    """It ends the answer with "stop", counts as a token, and has neither text nor logprobs."""
    drawn = {"max_tokens": 12, "temperature": 1.0, "seed": 5}
    whole = chat_served.engine.submit(Request(tokenizer.encode(ASKED), **drawn))
    assert whole.over.wait(20)
    end = next(i for i in range(3, 12) if whole.answer[i] not in whole.answer[:i])
    chat_served.app.stop_ids = frozenset([whole.answer[end]])
    _, answer = chat_served.post({"messages": TALK, "logprobs": True} | drawn, PATH)
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == tokenizer.decode(whole.answer[:end])
    assert choice["finish_reason"] == "stop" and len(choice["logprobs"]["content"]) == end
    assert answer["usage"]["completion_tokens"] == end + 1
