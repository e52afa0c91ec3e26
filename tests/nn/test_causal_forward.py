# SPDX-License-Identifier: BSD-3-Clause
"""The fused loss is put into a causal model's forward however a release of transformers writes its
steps, and is left out where a step computes something else.

Each case replaces lines of one forward, which is written to a file: the source is what is read.
"""

import copy
import importlib.util
import textwrap

import pytest
import torch
from conftest import generator

from torch_gpukern import nn as gnn

pytest.importorskip("transformers")

MODULE = """
import torch
from torch import nn
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutputWithPast


def slice_logits_to_keep(hidden_states, logits_to_keep):
    return hidden_states[:, -logits_to_keep:, :]


class Config:
    vocab_size = 70
    cap = 3.0
    other = 2.0
    scale = 0.25
    nothing = None
    return_dict = True
    output_attentions = False


class Outputs(tuple):
    last_hidden_state = property(lambda self: self[0])
    past_key_values = hidden_states = attentions = None


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(70, 16)

    def forward(self, input_ids, use_cache=None, **kwargs):
        return Outputs((torch.tanh(self.embedding(input_ids)),))


class TinyForCausalLM(nn.Module):
    loss_function = staticmethod(ForCausalLMLoss)

    def __init__(self):
        super().__init__()
        self.config, self.model, self.lm_head = Config(), Base(), nn.Linear(16, 70, bias=False)
        self.other, self.multiplier = nn.Linear(70, 70), 1.5
        self.learned = nn.Parameter(torch.tensor(1.5))

    def forward(self, input_ids=None, labels=None, use_cache=None, logits_to_keep=0, **kwargs):
BODY
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=outputs.past_key_values
        )
"""
STEPS = {
    "base": "outputs = self.model(input_ids=input_ids, use_cache=use_cache, **kwargs)",
    "hidden": "hidden_states = outputs.last_hidden_state",
    "keep": "hidden_states = slice_logits_to_keep(hidden_states, logits_to_keep)",
    "head": "logits = self.lm_head(hidden_states)",
    "logits": "loss = None",
    "loss": """
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs
            )""",
}
KEPT = "logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep"
SERVED = {
    "5.24": {},
    "5.10 to 5.20": {
        "keep": f"slice_indices = slice(-{KEPT}",
        "head": "logits = self.lm_head(hidden_states[:, slice_indices, :])",
    },
    "other names": {
        "base": "given: object = self.model(input_ids, use_cache=use_cache, **kwargs)\noutputs = given",
        "hidden": "x = outputs[0]",
        "keep": f"kept = slice(-{KEPT}",
        "head": "logits = self.lm_head(x[:, kept, :])",
    },
    "one expression": {
        "hidden": "loss = None",
        "keep": "loss = None",
        "head": "logits = self.lm_head(outputs[0]).float()",
    },
    "a cast": {
        "head": "logits = self.lm_head(hidden_states.to(self.lm_head.weight.dtype)).float()"
    },
    "a cast by name": {
        "head": "logits = self.lm_head(hidden_states.to(dtype=self.lm_head.weight.dtype))"
    },
    "a multiplier": {"head": "logits = self.lm_head(hidden_states) * self.multiplier"},
    "a scale and a softcap": {
        "logits": """
            logits = logits / self.config.scale
            cap = self.config.cap
            logits = nn.functional.tanh(logits / cap) * cap""",
    },
    "an optional softcap": {
        "logits": """
            if self.config.cap is not None:
                logits = logits.float() / self.config.cap
                logits = torch.tanh(logits)
                logits = logits * self.config.cap""",
    },
    "a softcap that is None": {
        "logits": """
            if self.config.nothing is not None:
                logits = torch.tanh(logits / self.config.nothing) * self.config.nothing""",
    },
    "a branch that changes nothing": {
        "keep": """
            if hidden_states.shape[1] == input_ids.shape[1]:
                hidden_states = slice_logits_to_keep(hidden_states, logits_to_keep)"""
    },
    "a loss that takes no kwargs": {
        "loss": """
            if labels is not None:
                labels = labels.to(logits.device)
                loss = self.loss_function(logits, labels, self.config.vocab_size)"""
    },
    "a loss that takes one": {
        "loss": """
            if labels is not None:
                loss = self.loss_function(
                    logits, labels, vocab_size=self.config.vocab_size,
                    num_items_in_batch=kwargs.get("num_items_in_batch"),
                )"""
    },
}
REFUSED = {
    "another slice": {"keep": f"hidden_states = hidden_states[:, slice(-1 - {KEPT}, :]"},
    "the first token dropped": {"keep": "hidden_states = hidden_states[:, 1:, :]"},
    "hidden states scaled": {"hidden": "hidden_states = outputs[0] / self.config.scale"},
    "a number": {"head": "logits = self.lm_head(hidden_states) * 2"},
    "a learned scale": {"head": "logits = self.lm_head(hidden_states) * self.learned"},
    "two scales": {
        "head": "logits = self.lm_head(hidden_states) * self.multiplier * self.multiplier"
    },
    "two softcaps": {"logits": "logits = torch.tanh(logits / self.config.cap) * self.config.other"},
    "a scale behind a softcap": {
        "logits": "logits = torch.tanh(logits / self.config.cap) * self.config.cap * self.multiplier",
    },
    "a softcap on a condition of its own": {
        "logits": """
            if self.config.nothing is not None:
                logits = torch.tanh(logits / self.config.cap) * self.config.cap"""
    },
    "another function": {"logits": "logits = torch.sigmoid(logits)"},
    "another module": {"logits": "logits = self.other(logits)"},
    "a cast to another dtype": {
        "head": "logits = self.lm_head(hidden_states.to(self.other.weight.dtype))"
    },
    "an argument changed": {"base": "input_ids = input_ids + 1\n" + STEPS["base"]},
    "an argument replaced": {"base": "use_cache = None\n" + STEPS["base"]},
    "another argument": {"base": "outputs = self.model(input_ids=labels, use_cache=use_cache)"},
    "hidden states on a condition": {
        "keep": """
            if self.config.nothing is not None:
                hidden_states = outputs[1]"""
    },
    "shifted labels": {
        "loss": """
            if labels is not None:
                loss = self.loss_function(logits, labels[..., 1:], self.config.vocab_size)"""
    },
    "an added loss": {
        "loss": STEPS["loss"] + "\n            loss = loss + self.learned",
    },
    "a loss of the logits": {
        "loss": STEPS["loss"] + "\n            loss = logits.logsumexp(-1).mean()",
    },
}


def model_of(steps, folder):
    lines = [textwrap.dedent(text).strip("\n") for text in (STEPS | steps).values()]
    body = textwrap.indent("loss = None\n" + "\n".join(lines), " " * 8)
    path = folder / "tiny.py"
    path.write_text(MODULE.replace("BODY", body))
    spec = importlib.util.spec_from_file_location("tiny", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    return module.TinyForCausalLM()


def losses_of(model, **more):
    ids = torch.randint(70, (2, 11), generator=generator("ids"))
    out = model(input_ids=ids, labels=ids.masked_fill(ids < 9, -100), **more)
    out.loss.backward()
    return out, [p.grad for p in model.parameters()]


@pytest.mark.parametrize("form", SERVED)
def test_a_forward_of_head_and_loss_is_found(form, tmp_path):
    model = model_of(SERVED[form], tmp_path)
    with torch.no_grad():
        model.lm_head.weight.mul_(20)  # so large that a softcap shows
    for more in ({}, {"num_items_in_batch": 7}):
        plain, ours = copy.deepcopy(model), copy.deepcopy(model)
        done = gnn.patch(ours, say=None, fused_linear_cross_entropy=True)
        assert done.skipped == {}
        (want, wanted), (got, grads) = losses_of(plain, **more), losses_of(ours, **more)
        assert want.logits is not None and got.logits is None
        torch.testing.assert_close(got.loss, want.loss, rtol=1e-5, atol=1e-5)
        for grad, other in zip(grads, wanted, strict=True):
            torch.testing.assert_close(grad, other, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("form", REFUSED)
def test_a_forward_that_computes_something_else_is_left(form, tmp_path):
    model = model_of(REFUSED[form], tmp_path)
    done = gnn.patch(model, say=None, fused_linear_cross_entropy=True)
    why = done.skipped["TinyForCausalLM"]
    if form == "a learned scale":
        assert why == "loss and logits as before: its learned is no number"
    else:
        assert why.startswith(
            "loss and logits as before: its forward does more than the head and the loss: "
        )
    assert "loss -> linear_cross_entropy" not in done.replaced.values()
