# SPDX-License-Identifier: BSD-3-Clause
"""Text from tokens: whole characters, stop strings, and no difference between few and many tokens a
step."""

import random

import pytest

from torch_gpukern.serve.text import Stream
from torch_gpukern.serve.tokenizer import Bytes


def test_text_comes_whole():
    """Characters of several bytes, and stop strings across tokens."""
    text = "naïve — 日本 stop here"
    stream = Stream(Bytes(), ["stop it", "stop h"])
    parts = [stream.add([b]) for b in text.encode()]
    assert "".join(parts) == "naïve — 日本 " and stream.stopped and "\ufffd" not in "".join(parts)
    stream = Stream(Bytes(), ["zz"])
    long = "xyz é " * 40 + "z"
    parts = [stream.add([b]) for b in long.encode()]
    assert "".join(parts) + stream.add([], last=True) == long


class ByteFallback:
    """As sentencepiece's: a run of byte tokens is text where all of it is valid, else U+FFFD for
    each byte. Above 255: words."""

    words = ("hello", " world", "日本")

    def decode(self, tokens):
        text, run = "", []
        for t in [*tokens, 256]:
            if t < 256:
                run.append(t)
                continue
            try:
                text += bytes(run).decode()
            except UnicodeDecodeError:
                text += "\ufffd" * len(run)
            run, text = [], text + ("" if t == 256 else self.words[t - 257])
        return text


@pytest.mark.parametrize("name", ("Bytes", "ByteFallback"))
def test_text_does_not_depend_on_how_many_tokens_a_step_brings(name):
    """As drafts bring them; the text is that of all bytes, nothing lost, and invalid bytes come at
    the end at the latest."""
    tokenizer = Bytes() if name == "Bytes" else ByteFallback()
    gen = random.Random(5)
    letters = "aé日本語𝄞 x"
    for each in range(1, 12):
        for _ in range(20):
            text = "".join(gen.choice(letters) for _ in range(60))
            tokens = list(text.encode())
            stream, parts, at = Stream(tokenizer), [], 0
            while at < len(tokens):
                step = each if gen.random() < 0.5 else gen.randint(1, each)
                parts.append(stream.add(tokens[at : at + step]))
                at += step
                assert text.startswith("".join(parts))
            assert "".join(parts) + stream.add([], last=True) == text
    stream = Stream(tokenizer)
    parts = stream.add([255, 254]) + stream.add(b"a") + stream.add([0xE6], last=True)
    assert (
        parts == "\ufffd\ufffda\ufffd"
        if name == "Bytes"
        else parts.count("\ufffd") + parts.count("a") >= 3
    )


@pytest.mark.parametrize("each", (1, 2, 3, 100))
@pytest.mark.parametrize(
    ("text", "stop", "want", "read"),
    [
        # the one that begins first, though the other is complete before
        ("abcd", ["abcd", "c"], "", 4),
        ("abcx", ["abcd", "c"], "ab", 4),
        ("abc", ["abcd", "c"], "ab", 3),
        ("ab--c", ["--", "-"], "ab", 3),
        ("xxENDyyyyyy", ["END"], "xx", 5),
        ("日本END!!", ["END"], "日本", 9),
    ],
)
def test_stop_strings_and_the_tokens_until_them(text, stop, want, read, each):
    stream, tokens = Stream(Bytes(), stop), list(text.encode())
    parts = [stream.add(tokens[at : at + each]) for at in range(0, len(tokens), each)]
    assert "".join(parts) + stream.add([], last=True) == want
    assert stream.stopped and len(stream.tokens) == read
