# SPDX-License-Identifier: BSD-3-Clause
"""PEFT over patched and quantised layers, up to a whole fine-tune: Trainer, checkpointing, FSDP2,
save and resume."""

import copy
from pathlib import Path

import pytest
import torch
from conftest import run_python
from torch import nn

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

import torch_gpukern.nn as gnn  # noqa: E402
from torch_gpukern.integrations import peft as gkpeft  # noqa: E402
from torch_gpukern.integrations import transformers as gk  # noqa: E402


@pytest.fixture(autouse=True, scope="module")
def _registered():
    gkpeft.register()
    gkpeft.register()


def causal_model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=70, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, pad_token_id=0,
        eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def lora(**changes):
    options = {
        "r": 4,
        "lora_alpha": 8,
        "lora_dropout": 0.0,
        "target_modules": ["q_proj", "down_proj"],
    }
    return peft.LoraConfig(**{**options, **changes})


IDS = torch.randint(3, 70, (2, 12), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("skip", [("lm_head",), (), ("lm_head", "*mlp*")])
def test_all_linear_finds_the_layers_that_it_finds_in_the_plain_model(skip):
    """A second adapter too, whose targets are the first one's layers and not their bases."""
    found = []
    for quantised in (False, True):
        model = causal_model()
        if quantised:
            gnn.quantize(model, "w8", skip=skip, say=None)
        config = lora(target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, config)
        model.add_adapter("other", lora(target_modules="all-linear", task_type="CAUSAL_LM"))
        found.append({n for n, _ in model.named_modules() if n.endswith("lora_A.other")})
        assert model(input_ids=IDS, labels=IDS).loss.isfinite()
    assert found[0] == found[1] and len(found[0]) == 14


@pytest.mark.parametrize("recipe", ["w4", "nvfp4", "fp8", "2:4"])
def test_lora_over_a_quantised_base(recipe):
    """The same loss and the same gradients of the adapters as over the decoded weights."""
    model = causal_model()
    plain = copy.deepcopy(model)
    gnn.quantize(model, recipe, say=None)
    with torch.no_grad():
        for name, m in model.named_modules():
            if isinstance(m, gnn.QuantizedLinear):
                plain.get_submodule(name).weight.copy_(m.decoded())
    made = []
    for m in (model, plain):
        torch.manual_seed(1)
        made.append(peft.get_peft_model(m, lora()))
        with torch.no_grad():
            for name, p in made[-1].named_parameters():
                if "lora_B" in name:
                    p.normal_(0, 0.05, generator=torch.Generator().manual_seed(len(name)))
    ours, theirs = made
    assert isinstance(model.model.layers[0].self_attn.q_proj, gkpeft.QuantizedLoraLinear)
    got, want = (m(input_ids=IDS, labels=IDS).loss for m in made)
    torch.testing.assert_close(got, want, rtol=3e-3, atol=3e-3)
    got.backward(), want.backward()
    trained = {
        n: p.grad for n, p in theirs.named_parameters() if p.grad is not None and "lora" in n
    }
    assert len(trained) == 8
    for name, p in ours.named_parameters():
        assert (p.grad is not None) == (name in trained), name
        if name in trained:
            off = (p.grad - trained[name]).norm() / trained[name].norm()
            assert off < (0.1 if recipe == "fp8" else 0.05), (name, float(off))


def test_what_needs_the_weight_is_refused():
    model = causal_model()
    gnn.quantize(model, "w4", say=None)
    with pytest.raises(ValueError, match="LoRA over a QuantizedLinear of recipe w4: use_dora"):
        peft.get_peft_model(copy.deepcopy(model), lora(use_dora=True))
    for name in ("pissa", "olora"):
        with pytest.raises(ValueError, match=f"init_lora_weights must be .*, got '{name}'"):
            peft.get_peft_model(copy.deepcopy(model), lora(init_lora_weights=name))
    with pytest.raises(ValueError, match="gpukern: GLoRA changes the base's weight"):
        peft.get_peft_model(copy.deepcopy(model), peft.GloraConfig(target_modules=["q_proj"]))
    with_adapter = peft.get_peft_model(model, lora())
    with pytest.raises(NotImplementedError, match="cannot be merged into a QuantizedLinear of rec"):
        with_adapter.merge_adapter()
    codes = model.model.layers[0].self_attn.q_proj.base_layer.weight_packed.clone()
    assert torch.equal(with_adapter.unload().model.layers[0].self_attn.q_proj.weight_packed, codes)


@pytest.mark.parametrize("how", ("merge_and_unload", "merge_adapter"))
def test_an_adapter_is_merged_after_restore(how):
    """What the refusal of merging says to do."""
    model = causal_model().eval()
    done = gnn.quantize(model, "w4", say=None)
    with_adapter = peft.get_peft_model(model, lora(init_lora_weights=False)).eval()
    done.restore()
    want = with_adapter(IDS).logits
    merged = getattr(with_adapter, how)() or with_adapter
    torch.testing.assert_close(merged(IDS).logits, want, rtol=1e-4, atol=1e-4)
    plain = copy.deepcopy(model)
    if how == "merge_adapter":
        with_adapter.unmerge_adapter()
        torch.testing.assert_close(with_adapter(IDS).logits, want, rtol=1e-4, atol=1e-4)
        assert not torch.equal(
            plain.model.layers[0].self_attn.q_proj.base_layer.weight,
            model.model.layers[0].self_attn.q_proj.base_layer.weight,
        )


def test_glora_over_patched_layers():
    made = []
    for patched in (False, True):
        model = causal_model()
        if patched:
            gnn.patch(model, None)
        torch.manual_seed(1)
        made.append(
            peft.get_peft_model(model, peft.GloraConfig(target_modules=["q_proj", "up_proj"]))
        )
        with torch.no_grad():
            for p in made[-1].parameters():
                if p.requires_grad:
                    p.normal_(0, 0.05, generator=torch.Generator().manual_seed(p.numel()))
    plain, ours = made
    got, want = (m(input_ids=IDS, labels=IDS).loss for m in (ours, plain))
    torch.testing.assert_close(got, want)
    got.backward(), want.backward()
    for (name, p), q in zip(ours.named_parameters(), plain.parameters(), strict=True):
        if q.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-6, msg=name)
    for m in made:
        m.merge_adapter()
    torch.testing.assert_close(ours(IDS).logits, plain(IDS).logits, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        fused = gnn.Linear(8, 8, activation="relu")
    with pytest.raises(ValueError, match="not a plain torch.nn.Linear"):
        peft.get_peft_model(nn.Sequential(fused), peft.GloraConfig(target_modules=["0"]))


# ---- a whole fine-tune ---------------------------------------------------------------------------


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, i):
        ids = torch.randint(3, 70, (16,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": ids, "labels": ids}


def fine_tune(folder, steps, resume=None, recipe="w4", accelerated=True):
    """Losses of each step, and the adapters."""
    pytest.importorskip("accelerate")
    model = causal_model()
    if accelerated:
        gk.accelerate(model, recipe, say=None)
    else:
        gnn.quantize(model, recipe, say=None)
    torch.manual_seed(1)
    model = peft.get_peft_model(model, lora())
    options = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=6, per_device_train_batch_size=4, logging_steps=1,
        save_steps=3, learning_rate=1e-2, report_to=[], use_cpu=True, seed=3,
        gradient_checkpointing=True, lr_scheduler_type="constant", disable_tqdm=True,
    )  # fmt: skip

    class Stop(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step >= steps

    trainer = transformers.Trainer(model, options, train_dataset=Data(), callbacks=[Stop()])
    trainer.train(resume_from_checkpoint=resume)
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    return losses, {n: p.detach().clone() for n, p in model.named_parameters() if "lora" in n}


def test_a_fine_tune_that_is_resumed(tmp_path):
    """Trainer, LoRA, a w4 base, checkpointing: six steps at once, and three and three."""
    whole, adapters = fine_tune(tmp_path / "whole", 6)
    assert len(whole) == 6 and len(set(whole)) == 6
    first, _ = fine_tune(tmp_path / "parts", 3)
    rest, resumed = fine_tune(tmp_path / "parts", 6, str(tmp_path / "parts" / "checkpoint-3"))
    assert first == whole[:3] and rest == whole
    for name, p in adapters.items():
        assert torch.equal(p, resumed[name]), name
    plain, _ = fine_tune(tmp_path / "plain", 6, accelerated=False)
    torch.testing.assert_close(torch.tensor(whole), torch.tensor(plain), rtol=2e-2, atol=2e-2)


def test_adapters_load_over_a_quantised_base(tmp_path):
    model = causal_model()
    gnn.quantize(model, "w4", say=None)
    trained = peft.get_peft_model(copy.deepcopy(model), lora())
    with torch.no_grad():
        for name, p in trained.named_parameters():
            if "lora_B" in name:
                p.normal_(0, 0.1)
    trained.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(model, tmp_path)
    assert torch.equal(again(IDS).logits, trained(IDS).logits)


def test_fsdp2_on_two_ranks(tmp_path):
    """The adapters of two ranks' steps are those of one process over the whole batch."""
    run_python(f"""
        import sys
        import torch.multiprocessing
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        import fsdp_lora, test_integrations_peft
        test_integrations_peft.transformers.LlamaForCausalLM  # imported once, for both ranks

        torch.multiprocessing.start_processes(
            fsdp_lora.main, ({str(tmp_path / "store")!r},), nprocs=2, start_method="fork"
        )
    """)
