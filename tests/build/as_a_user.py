# SPDX-License-Identifier: BSD-3-Clause
"""Runs what the pages for users say in an environment that has the wheel, away from this checkout.

    PYTHONPATH=tests python tests/build/as_a_user.py ENVIRONMENT/bin/python

The blocks of README.md and of the pages run as test_docs_code.py runs them here. Then each line of
docs/integrations.md's table that has no block of its own, and the commands. A step that needs a
package which the environment lacks is named and left out. test_packaging.py calls this file with
an environment of its own; release builds may call it with one that pip filled.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from test_docs_code import CHECKS, PAGES, ROOT, blocks

MODEL = """
import sys, transformers
from tokenizers import Tokenizer, models, pre_tokenizers
config = transformers.LlamaConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=128, pad_token_id=0, eos_token_id=1)
transformers.LlamaForCausalLM(config).save_pretrained(sys.argv[1])
words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(128)}, unk_token="w2"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1", pad_token="w0")
tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
tokenizer.save_pretrained(sys.argv[1])
"""  # noqa: E501
# label: (packages that it needs, the code)
LINES = {
    "DTensor: gemm over two placements": (
        ["torch"],
        """
import torch, torch.distributed as dist, torch_gpukern
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
mesh = init_device_mesh("cpu", (1,))
a, b = torch.randn(4, 8), torch.randn(8, 6)
out = torch_gpukern.gemm(distribute_tensor(a, mesh, [Shard(0)]), distribute_tensor(b, mesh, [Shard(1)]))
torch.testing.assert_close(out.full_tensor(), a @ b)
""",  # noqa: E501
    ),
    "nn.quantize: the layers that stand in the table": (
        ["torch"],
        """
import torch, torch_gpukern
model = torch.nn.Sequential(torch.nn.Linear(256, 128), torch.nn.Linear(128, 64)).bfloat16()
torch_gpukern.nn.quantize(model, "w4")
assert model(torch.randn(3, 256).bfloat16()).shape == (3, 64)
""",
    ),
    "vLLM's entry point": (
        ["vllm"],
        """
from importlib.metadata import entry_points
[point] = [p for p in entry_points(group="vllm.general_plugins") if p.name == "gpukern"]
point.load()()
""",
    ),
    "an engine of your own: serve.Engine": (
        ["transformers"],
        """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from torch_gpukern.serve import Engine, Request, TransformersModel
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
net = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
engine = Engine(TransformersModel(net, num_blocks=512), max_batch=16)
with engine:
    requests = [engine.submit(Request(tokenizer.encode(text), max_tokens=4)) for text in ("w5", "w6 w7")]
    for request in requests:
        request.over.wait()
assert all(request.answer for request in requests)
""",  # noqa: E501
    ),
    "the kernels hub": (
        ["kernels"],
        """
import sys, torch
from pathlib import Path
from kernels import get_local_kernel
hub = get_local_kernel(Path(sys.argv[2]))
a, b = torch.randn(4, 8), torch.randn(8, 6)
torch.testing.assert_close(hub.gemm(a, b), a @ b)
q = torch.randn(1, 5, 2, 16)
assert hub.flash_attn_func(q, q, q, causal=True).shape == q.shape
""",
    ),
}


class Failed(Exception):
    pass


class User:
    """An environment, and an empty folder in which everything runs."""

    def __init__(self, python: Path, folder: Path):
        self.python, self.folder = python, folder
        self.bad: list[str] = []
        # as a user has it: no path of this checkout, no compiler launcher, its own commands first
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "GPUKERN"))}
        self.env["PATH"] = f"{python.parent}:/usr/bin:/bin"

    def run(self, *words, seconds: float = 300) -> str:
        done = subprocess.run(
            [str(w) for w in words], cwd=self.folder, env=self.env, capture_output=True, text=True,
            timeout=seconds,
        )  # fmt: skip
        if done.returncode:
            raise Failed(f"exit {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
        return done.stdout

    def code(self, text: str, *arguments) -> str:
        own = "import torch_gpukern as _g, sys as _s; assert _g.__file__.startswith(_s.prefix)\n"
        return self.run(self.python, "-c", own + text, *arguments)

    def has(self, package: str) -> bool:
        found = f"import importlib.util as u; print(u.find_spec({package!r}) is not None)"
        return self.run(self.python, "-c", found).strip() == "True"

    def step(self, label: str, needs: list[str], work) -> None:
        missing = [p for p in needs if not self.has(p)]
        begin = time.monotonic()
        try:
            if not missing:
                work()
        except (Failed, AssertionError, OSError, subprocess.TimeoutExpired) as error:
            self.bad.append(label)
            print(f"FAILED  {label}: {error}", flush=True)
            return
        how = f"left out (no {', '.join(missing)})" if missing else "ok"
        print(f"{how:7} {label} ({time.monotonic() - begin:.1f} s)", flush=True)

    # ---- steps -----------------------------------------------------------------------------------

    def line(self, text: str, model: Path, hub: Path | None) -> None:
        """A line of the table. The kernels hub's is made by this checkout first."""
        if hub is not None:
            made = subprocess.run(
                [sys.executable, ROOT / "cmake" / "hub.py", hub], capture_output=True, text=True
            )
            if made.returncode:
                raise Failed(made.stderr.strip())
        self.code(text, model, *([] if hub is None else [hub]))

    def page(self, page: str) -> None:
        text = "\n".join([PAGES[page], *blocks(page), CHECKS.get(page, "")])
        printed = self.code(text).splitlines()
        shown = re.findall(r"^# (gpukern: .*)$", text, re.MULTILINE)
        missing = [line for line in shown if line not in printed]
        if missing:
            raise Failed(f"not printed: {missing}")

    def command(self, *words, says: str = "") -> None:
        out = self.run(self.python.parent / "gpukern", *words)
        if says not in out:
            raise Failed(f"{says!r} is not in {out!r}")

    def serve(self, *words) -> None:
        """`gpukern serve`: a completion and a chat."""
        process = subprocess.Popen(
            [self.python.parent / "gpukern", "serve", *words, "--port", "0"], cwd=self.folder,
            env=self.env, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            line = process.stdout.readline()  # type: ignore[union-attr]
            found = re.search(r"http://127\.0\.0\.1:\d+/v1", line)
            if not found:
                raise Failed(f"no address in {line!r}")
            asked = {"max_tokens": 4, "temperature": 0}
            for path, body in (
                ("completions", {"prompt": "w5 w6"} | asked),
                ("chat/completions", {"messages": [{"role": "user", "content": "w5"}]} | asked),
            ):
                request = urllib.request.Request(f"{found[0]}/{path}", json.dumps(body).encode())
                answer = json.load(urllib.request.urlopen(request, timeout=120))
                assert answer["usage"]["completion_tokens"] >= 1, answer
        finally:
            process.terminate()
            process.wait(60)


def main() -> int:
    # not resolved: an environment's python is a link, and its folder says which environment it is
    python = Path(sys.argv[1]).absolute()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        user, model, few = User(python, folder), folder / "model", folder / "few"
        print(user.code("print(_g.__version__, _g.__file__)").strip(), flush=True)
        for page in PAGES:
            needs = {"docs/integrations.md": ["transformers", "peft"]}
            needs["docs/quantise.md"] = ["transformers"]
            user.step(page, needs.get(page, []), lambda page=page: user.page(page))
        if user.has("transformers"):
            user.run(python, "-c", MODEL, model)
        for label, (needs, text) in LINES.items():
            hub = folder / "hub" if label == "the kernels hub" else None
            user.step(label, needs, lambda text=text, hub=hub: user.line(text, model, hub))
        user.step("gpukern doctor", [], lambda: user.command("doctor", says="calls on cpu"))
        explain = "explain", "gemm", "512", "4096", "4096"
        user.step("gpukern explain", [], lambda: user.command(*explain, says="gemm"))
        quantise = ["safetensors", "tqdm", "transformers"]
        for layout in ([], ["--layout", "compressed-tensors"]):
            out = f"{few}{len(layout)}"
            words = "quantize", model, "--recipe", "int8", "--out", out, *layout
            user.step(f"gpukern quantize {' '.join(layout)}", quantise,
                      lambda words=words: user.command(*words))  # fmt: skip
        serve = ["transformers", "jinja2", "starlette", "uvicorn", "prometheus_client"]
        user.step("gpukern serve", serve, lambda: user.serve(model))
        user.step(
            "gpukern serve, 8-bit cache", serve, lambda: user.serve(model, "--kv-cache", "e4m3")
        )  # noqa: E501
        user.step("gpukern serve of a quantised directory", serve, lambda: user.serve(f"{few}0"))
        bench = "bench", "serve", "--at-once", "2", "--prompt", "8", "--tokens", "4"
        user.step("gpukern bench serve", serve, lambda: user.command(*bench, says="tokens/s"))
        print(f"{len(user.bad)} failed", *user.bad, sep="\n  ")
    return bool(user.bad)


if __name__ == "__main__":
    sys.exit(main())
