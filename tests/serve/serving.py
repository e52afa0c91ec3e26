# SPDX-License-Identifier: BSD-3-Clause
"""What the tests of serving share: prompts, a loop of steps, whether anything of a request is left
behind, a model's directory."""

import random

from torch_gpukern.serve.random_models import random_llama


def prompts_of(*lengths, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(512) for _ in range(n)] for n in lengths]


def run(engine, steps=2000):
    while engine.step():
        steps -= 1
        assert steps, "it does not end"


def all_free(engine):
    return (
        engine.used_pages == 0
        and not engine.cache.sequences
        and not engine.running
        and not engine.waiting
    )


TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def save_model(directory, template=TEMPLATE):
    """A tiny Llama with random weights and a tokenizer of bytes, as transformers saves them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    fast.chat_template = template
    fast.save_pretrained(directory)
    random_llama("tiny").save_pretrained(directory)
    return directory
