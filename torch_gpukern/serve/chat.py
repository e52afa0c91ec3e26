# SPDX-License-Identifier: BSD-3-Clause
"""POST /v1/chat/completions: a conversation by the tokenizer's own template, and the form of its
answers."""

from __future__ import annotations

from typing import Any

from .answers import Part, Token
from .call import Call, read
from .fields import Fields
from .request import MOST_LOGPROBS, Refused, integer, shown

ROLES = ("system", "user", "assistant")


class Chat:
    prefix = "chatcmpl"
    kind = "chat.completion"
    kind_of_part = "chat.completion.chunk"

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def opening(self, index: int) -> dict:
        return self.delta(index, {"role": "assistant", "content": ""}, [], None)

    def part(self, part: Part) -> dict:
        said = {"content": part.text} if part.text else {}
        return self.delta(part.answer, said, part.tokens, part.finish)

    def delta(self, index: int, said: dict, tokens: list[Token], finish: str | None) -> dict:
        return {
            "index": index,
            "delta": said,
            "logprobs": self.logprobs(tokens) if tokens else None,
            "finish_reason": finish,
        }

    def whole(self, index: int, text: str, tokens: list[Token], finish: str) -> dict:
        return {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": self.logprobs(tokens) if tokens else None,
            "finish_reason": finish,
        }

    def logprobs(self, tokens: list[Token]) -> dict:
        content = [
            self.entry(t.token, t.scores.logprob)
            | {"top_logprobs": [self.entry(i, x) for i, x in t.scores.top]}
            for t in tokens
        ]
        return {"content": content, "refusal": None}

    def entry(self, token: int, logprob: float) -> dict:
        text, data = self.tokenizer.piece(token)
        return {"token": text, "logprob": logprob, "bytes": None if data is None else list(data)}


def conversation(value: object) -> list[dict[str, str]]:
    """Messages with a role and a text each."""
    if not isinstance(value, list) or not value:
        raise Refused("messages", f"messages is {shown(value)}; expected a list of messages")
    return [message(f"messages[{i}]", x) for i, x in enumerate(value)]


def message(name: str, value: object) -> dict[str, str]:
    if not isinstance(value, dict):
        raise Refused("messages", f"{name} is {shown(value)}; expected an object")
    role = value.get("role")
    role = "system" if role == "developer" else role  # OpenAI's newer word for the same
    if role not in ROLES:
        raise Refused(
            "messages", f"{name}.role is {shown(role)}; expected one of {', '.join(ROLES)}"
        )
    unknown = [k for k, x in value.items() if k not in ("role", "content") and x is not None]
    if unknown:
        raise Refused("messages", f"{name} has {shown(unknown[0])}, which is not known here")
    return {"role": role, "content": content(f"{name}.content", value.get("content"))}


def content(name: str, value: object) -> str:
    """A string, or a list of parts that are texts."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value:
        for part in value:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind != "text" or not isinstance(part.get("text"), str):
                raise Refused(
                    "messages",
                    f"{name} has a part {shown(part)}; only parts of type text are served",
                )
        return "".join(part["text"] for part in value)
    raise Refused("messages", f"{name} is {shown(value)}; expected a string")


def parse(fields: Fields, tokenizer: Any, stop_ids: frozenset[int]) -> Call:
    prompt = tokenizer.chat(conversation(fields.take("messages")))
    wanted, top = fields.boolean("logprobs"), fields.take("top_logprobs")
    if top is not None and not wanted:
        raise Refused("top_logprobs", f"top_logprobs is {shown(top)}; expected logprobs: true too")
    logprobs = integer("top_logprobs", top or 0, 0, MOST_LOGPROBS) if wanted else None
    newer, older = fields.take("max_completion_tokens"), fields.take("max_tokens")
    if newer is not None and older is not None:
        raise Refused("max_tokens", "max_tokens and max_completion_tokens are the same; give one")
    fields.only("tools", [])
    fields.only("tool_choice", "none", "auto")
    fields.only("response_format", {"type": "text"})
    fields.only("store", False)
    fields.only("service_tier", "auto", "default")
    fields.boolean("parallel_tool_calls")  # no tools are served
    metadata = fields.take("metadata")
    if metadata is not None and not isinstance(metadata, dict):
        raise Refused("metadata", f"metadata is {shown(metadata)}; expected an object")
    return read(
        fields,
        Chat(tokenizer),
        [prompt],
        max_tokens=older if newer is None else newer,
        logprobs=logprobs,
        stop_ids=stop_ids,
    )
