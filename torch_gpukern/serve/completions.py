# SPDX-License-Identifier: BSD-3-Clause
"""POST /v1/completions: the fields of a call, and the form of its answers."""

from __future__ import annotations

from typing import Any

from .answers import Part, Token
from .call import Call, read
from .fields import Fields
from .request import MOST_LOGPROBS, Refused, integer, shown
from .tokenizer import REPLACEMENT

MAX_TOKENS = 16  # where the call says nothing, as OpenAI's


class Completions:
    prefix = "cmpl"
    kind = kind_of_part = "text_completion"

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def opening(self, index: int) -> None:
        return None

    def part(self, part: Part) -> dict:
        return self.choice(part.answer, part.text, part.tokens, part.finish)

    def whole(self, index: int, text: str, tokens: list[Token], finish: str) -> dict:
        return self.choice(index, text, tokens, finish)

    def choice(self, index: int, text: str, tokens: list[Token], finish: str | None) -> dict:
        return {
            "index": index,
            "text": text,
            "logprobs": self.logprobs(tokens) if tokens else None,
            "finish_reason": finish,
        }

    def logprobs(self, tokens: list[Token]) -> dict:
        """Four lists, an entry a token. The most likely tokens include the one that was drawn."""
        return {
            "tokens": [self.name(t.token) for t in tokens],
            "token_logprobs": [t.scores.logprob for t in tokens],
            "top_logprobs": [
                {self.name(i): x for i, x in [*t.scores.top, (t.token, t.scores.logprob)]}
                for t in tokens
            ],
            "text_offset": [t.offset for t in tokens],
        }

    def name(self, token: int) -> str:
        """A token's text. One that is a part of a character has a number instead: several of them
        have the same text."""
        text, _ = self.tokenizer.piece(token)
        return f"token_id:{token}" if REPLACEMENT in text else text


def prompts_of(value: object, tokenizer: Any) -> list[list[int]]:
    """The tokens of a string, a list of tokens, or a list of either."""
    if isinstance(value, str):
        return [list(tokenizer.encode(value))]
    if isinstance(value, list) and value:
        if all(type(t) is int for t in value):
            return [value]
        if all(isinstance(x, str) for x in value):
            return [list(tokenizer.encode(x)) for x in value]
        if all(isinstance(x, list) and all(type(t) is int for t in x) for x in value):
            return value
    raise Refused(
        "prompt",
        f"prompt is {shown(value)}; expected a string, a list of token ids, or a list of either",
    )


def parse(fields: Fields, tokenizer: Any, stop_ids: frozenset[int]) -> Call:
    prompts = prompts_of(fields.take("prompt"), tokenizer)
    logprobs = fields.take("logprobs")
    if logprobs is not None:
        logprobs = integer("logprobs", logprobs, 0, MOST_LOGPROBS)
    fields.only("best_of", 1)
    fields.only("echo", False)
    fields.only("suffix", "")
    return read(
        fields,
        Completions(tokenizer),
        prompts,
        max_tokens=fields.take("max_tokens", MAX_TOKENS),
        logprobs=logprobs,
        stop_ids=stop_ids,
    )
