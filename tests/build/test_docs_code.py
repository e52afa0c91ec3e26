# SPDX-License-Identifier: BSD-3-Clause
"""The Python code in README.md and in the pages for users runs on the CPU as printed.

The blocks of a page run one after the other, with the names that a page leaves to its reader. Pages
that need the same imports share a process.
"""

import importlib
import re
from pathlib import Path

import pytest
from conftest import run_python

ROOT = Path(__file__).resolve().parents[2]

INTEGRATIONS = """
import tempfile, torch, transformers
config = transformers.LlamaConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                                  num_key_value_heads=2, vocab_size=128, pad_token_id=0, eos_token_id=1)
path = tempfile.mkdtemp()
transformers.LlamaForCausalLM(config).save_pretrained(path)
inputs = [[5, 6, 7], [8, 9, 10, 11]]
ids = torch.tensor([[5, 6, 7, 8]])
generation_config = transformers.GenerationConfig(max_new_tokens=3, do_sample=False, eos_token_id=-1, pad_token_id=0)
q, k, v = (torch.randn(2, 9, 4, 16) for _ in range(3))
latent = dict(kv_lora_rank=32, q_lora_rank=24, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=24)
deepseek = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(
    hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4, vocab_size=128,
    pad_token_id=0, eos_token_id=None, bos_token_id=None, **latent))
prompt = torch.tensor([[5, 6, 7]])
"""  # noqa: E501
SERVING = """
steps, graph = [], lambda: None
graph.replay = lambda: steps.append(lens[0].item())
prompt = list(range(40))

def still_running(batch):
    return batch if len(steps) < 3 else []

class Batch:
    \"\"\"Of two sequences that a reader has: made when the page comes to it.\"\"\"
    def __iter__(self):
        self.handles = getattr(self, "handles", None) or [cache.allocate(), cache.allocate()]
        return iter(self.handles)

batch = Batch()
"""
QUANTISE = """
import tempfile, torch, transformers

class Mlp(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(1024, 4096), torch.nn.Linear(4096, 1024)
        self.lm_head = torch.nn.Linear(1024, 16)

model = Mlp().bfloat16()
config = transformers.MixtralConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, num_local_experts=4,
                                    num_key_value_heads=2, vocab_size=128, pad_token_id=0, eos_token_id=1)
path = tempfile.mkdtemp()
transformers.MixtralForCausalLM(config).save_pretrained(path)
"""  # noqa: E501
DISTRIBUTED = """
import torch, torch.distributed as dist
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
group, seq_len, tables = dist.group.WORLD, 9, lambda at: (at.cos(), at.sin())
q, k, v = torch.randn(2, 4, 9, 16), torch.randn(2, 2, 9, 16), torch.randn(2, 2, 9, 16)
"""
PAGES = {
    "README.md": "",
    "docs/integrations.md": INTEGRATIONS,
    "docs/quantise.md": QUANTISE,
    "docs/paged_cache.md": SERVING,
    "docs/distributed.md": DISTRIBUTED,
}
CHECKS = {
    "README.md": "assert y.shape == (32, 512) and o.shape == q.shape\n",
    "docs/quantise.md": "assert model(torch.tensor([[5, 6, 7]])).logits.shape == (1, 3, 128)\n",
    "docs/paged_cache.md": "assert steps == [1, 2, 3] and sequence in cache.sequences and known == 0\n",
    "docs/distributed.md": "assert out.shape == q.shape and len(cos) == 9 and step.gpus == 1024\n",
}


def blocks(page):
    """The code between ```python and ```, changed to run on the CPU."""
    found = re.findall(
        r"^```python\n(.*?)^```", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE
    )
    return [block.replace('device="cuda"', 'device="cpu"') for block in found]


@pytest.mark.parametrize(
    "pages",
    (
        ["README.md"],
        ["docs/integrations.md", "docs/quantise.md"],
        ["docs/paged_cache.md", "docs/distributed.md"],
    ),
    ids=" ".join,
)
def test_blocks_run(pages):
    """Runs each group in a process of its own, because blocks register attention functions with
    transformers and PyTorch. Comments show what is printed."""
    parts, shown = [], []
    for page in pages:
        code = blocks(page)
        assert len(code) >= 1
        if page == "docs/integrations.md":
            pytest.importorskip("transformers")
            from torch.nn import attention

            if not hasattr(attention, "activate_flash_attention_impl"):  # torch 2.10
                code = [block for block in code if "activate_flash" not in block]
        parts += [PAGES[page], *code, CHECKS.get(page, "")]
        shown += re.findall(r"^# (gpukern: .*)$", "\n".join(code), re.MULTILINE)
    printed = run_python("\n".join(parts)).stdout.splitlines()
    assert [line for line in shown if line not in printed] == []


def test_the_first_page_has_the_lines_of_the_readme():
    assert blocks("docs/index.md") == blocks("README.md")


def test_the_lines_of_the_tables_name_what_there_is():
    """`torch_gpukern.nn.patch(model)` works after `import torch_gpukern`, and so does every line
    that a table offers."""
    names = set()
    for page in PAGES:
        names |= set(re.findall(r"`(torch_gpukern(?:\.\w+)+)\(", (ROOT / page).read_text()))
    assert {"torch_gpukern.nn.patch", "torch_gpukern.integrations.transformers.register"} <= names
    pytest.importorskip("transformers")
    run_python(
        "\n".join(["import torch_gpukern", *(f"assert callable({name})" for name in sorted(names))])
    )


@pytest.mark.parametrize("page", PAGES)
def test_modules_that_are_imported_exist(page):
    """Also in the lines of tables."""
    lines = re.findall(r"`(?:import|from) (torch_gpukern[\w.]*)", (ROOT / page).read_text())
    for name in lines:
        importlib.import_module(name)
