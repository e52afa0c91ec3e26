# SPDX-License-Identifier: BSD-3-Clause
"""transformers' models with attn_implementation="gpukern" beside "sdpa", or beside "eager" if a
model refuses "sdpa".

python benchmarks/bench_integrations.py [--device cuda|cpu] [--only llama gemma2 ...] [--save]
    [--seconds 1.0]

Models have random weights, 0.3e9 of them on CUDA in bfloat16. Both implementations run alternately
in one process on the same inputs. Stated are medians and half the interquartile range.

- Prefill: 2 x 4096 tokens, no cache.
- Training: forward and backward of 2 x 2048 tokens.
- Left-padded: prefill of 8 sequences of 256 to 2048 tokens in 8 x 2048.
- Static cache: one more token for each of 8 sequences, with 2048 of 8192 places filled; once with
  its launches, and once replayed from a CUDA graph.

The error of a token is the largest difference of its logits from a float32 run of the same weights
on "eager", over the largest of all logits. Stated are the median token's and the worst token's, of
ours and of the peer. The worst is large in models that choose experts: rounding to bfloat16 sends
one token in thirty to another expert, on either side.

Where transformers is not installed, carry its wheels: with pip of the same Python
    pip download --no-deps --only-binary :all: -d .whl transformers==5.24.0 huggingface_hub==2.4.0
        tokenizers==0.23.3 \\ safetensors==0.8.0 regex pyyaml tqdm packaging filelock fsspec typer
        click rich shellingham hf-xet httpx2 httpcore2 \\ anyio h11 idna typing-extensions
        truststore annotated-doc
(25 MB in all; `--python-version 3.12 --platform manylinux2014_x86_64` for another Python), and
there
    pip install --no-deps --no-index .whl/*.whl
"""

from __future__ import annotations

import argparse
import copy
import datetime
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from devices import nvidia_driver
from harness import RESULTS

from torch_gpukern import results
from torch_gpukern.integrations import transformers as integration

import transformers  # isort: skip

LARGE = {
    "width": 2048,
    "heads": 16,
    "heads_kv": 4,
    "layers": 6,
    "inner": 5632,
    "words": 32000,
    "window": 1024,
}
SMALL = {
    "width": 64,
    "heads": 4,
    "heads_kv": 2,
    "layers": 2,
    "inner": 96,
    "words": 128,
    "window": 16,
}


def families(size: dict) -> dict[str, tuple[str, str, dict]]:
    """name -> configuration class, model class, options beyond the common ones."""
    both = ["sliding_attention", "full_attention"] * (size["layers"] // 2)
    window = {"sliding_window": size["window"]}
    head_dim = size["width"] // size["heads"]
    half = head_dim // 2
    return {
        "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
        "mistral": ("MistralConfig", "MistralForCausalLM", window),
        "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {}),
        "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {**window, "layer_types": both}),
        "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {**window, "layer_types": both}),
        "gpt_oss": (
            "GptOssConfig",
            "GptOssForCausalLM",
            {
                **window,
                "layer_types": both,
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "rope_parameters": None,
            },
        ),
        "mixtral": (
            "MixtralConfig",
            "MixtralForCausalLM",
            {"num_local_experts": 4, "num_experts_per_tok": 2},
        ),
        "deepseek_v3": (
            "DeepseekV3Config",
            "DeepseekV3ForCausalLM",
            {
                "num_key_value_heads": size["heads"],
                "q_lora_rank": size["width"] // 2,
                "kv_lora_rank": size["width"] // 4,
                "qk_rope_head_dim": half,
                "qk_nope_head_dim": head_dim,
                "v_head_dim": head_dim,
                "n_routed_experts": 4,
                "num_experts_per_tok": 2,
                "n_group": 1,
                "topk_group": 1,
                "moe_intermediate_size": size["inner"] // 4,
                "first_k_dense_replace": 1,
            },
        ),
    }


def build(name: str, size: dict, device: str, dtype: torch.dtype) -> torch.nn.Module:
    config_name, model_name, extra = families(size)[name]
    common = {
        "hidden_size": size["width"],
        "intermediate_size": size["inner"],
        "num_hidden_layers": size["layers"],
        "num_attention_heads": size["heads"],
        "num_key_value_heads": size["heads_kv"],
        "head_dim": size["width"] // size["heads"],
        "vocab_size": size["words"],
        "max_position_embeddings": 16384,
        "tie_word_embeddings": True,
        "attention_dropout": 0.0,
        "pad_token_id": 0,
    }
    extra = {key: value for key, value in extra.items() if value is not None}
    if name == "deepseek_v3":
        common.pop("head_dim")
    torch.manual_seed(0)
    config = getattr(transformers, config_name)(**{**common, **extra})
    with torch.device(device), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return (
            getattr(transformers, model_name)
            ._from_config(config, attn_implementation="eager", dtype=dtype)
            .eval()
        )


def peer_of(model: torch.nn.Module) -> str:
    try:
        model.set_attn_implementation("sdpa")
    except ValueError:
        return "eager"
    return "eager" if getattr(model.config, "attn_logit_softcapping", None) else "sdpa"


def time_of(call: Callable[[], object], device: str) -> float:
    """Milliseconds of a call."""
    if device == "cpu":
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def interleaved(
    calls: dict[str, Callable[[], object]], device: str, seconds: float
) -> dict[str, list[float]]:
    for call in calls.values():
        call()
        call()
    found: dict[str, list[float]] = {name: [] for name in calls}
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(next(iter(found.values()))) < 3:
        for name, call in calls.items():
            found[name].append(time_of(call, device))
    return found


def graphed(call: Callable[[], object], device: str) -> Callable[[], object]:
    """The call as a CUDA graph, as PyTorch's manual says: a few runs on a side stream, then the
    capture."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()

    def replay(owner=call):
        """Replays the graph. A graph holds only addresses, so `owner` keeps the call's cache and
        inputs alive."""
        graph.replay()

    return replay


class Bench:
    def __init__(self, device: str, seconds: float):
        self.device, self.seconds, self.rows = device, seconds, []
        self.size, self.dtype = (
            (LARGE, torch.bfloat16) if device == "cuda" else (SMALL, torch.float32)
        )
        # tokens of the prefill, the training step and the padded batch; size of the static cache
        self.tokens = (4096, 2048, 2048, 8192) if device == "cuda" else (128, 64, 64, 256)

    def ids(self, batch: int, length: int) -> torch.Tensor:
        return torch.randint(3, self.size["words"], (batch, length), device=self.device)

    def compare(
        self, family: str, what: str, model, run: Callable[[torch.nn.Module], Callable], graph=False
    ) -> None:
        """run(model) returns a call for the implementation that the model has at that time. The
        call returns logits, or None."""
        peer = peer_of(model)
        calls, logits = {}, {}
        for name in ("gpukern", peer):
            model.set_attn_implementation(name)
            call = run(model)
            calls[name] = self.held(model, name, call)
            logits[name] = calls[name]()
            if graph:
                calls[name] = graphed(calls[name], self.device)
        row = {"family": family, "step": what, "peer": peer}
        if logits["gpukern"] is not None:
            exact = self.exact(model, run)
            for name, side in (("gpukern", ""), (peer, "peer_")):
                of_tokens = (logits[name].float() - exact).abs().amax(-1) / exact.abs().max()
                row[f"{side}error"], row[f"{side}worst"] = (
                    of_tokens.median().item(),
                    of_tokens.max().item(),
                )
            del exact
        del logits
        found = interleaved(calls, self.device, self.seconds)
        for name, key in (("gpukern", "ours_ms"), (peer, "peer_ms")):
            low, middle, high = statistics.quantiles(found[name], n=4)
            row[key], row[key.replace("_ms", "_spread")] = middle, (high - low) / 2
        row["ratio"] = row["peer_ms"] / row["ours_ms"]
        self.rows.append(row)
        errors = (
            "{error:.1e} {worst:.1e} ({peer_error:.1e} {peer_worst:.1e})".format(**row)
            if "error" in row
            else ""
        )
        print(
            f"{family:12} {what:28} {row['ours_ms']:9.2f} +- {row['ours_spread']:<6.2f} {peer:6} "
            f"{row['peer_ms']:9.2f} "
            f"+- {row['peer_spread']:<6.2f} {row['ratio']:6.2f}  {errors}",
            flush=True,
        )

    @staticmethod
    def exact(model: torch.nn.Module, run: Callable) -> torch.Tensor:
        """The call's result in float32 on "eager"."""
        wide = copy.deepcopy(model).float()
        wide.set_attn_implementation("eager")
        return run(wide)()

    @staticmethod
    def held(model, name: str, call: Callable) -> Callable:
        """The implementation is state of the model, so each call sets its own first (a few
        microseconds)."""
        configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values()

        def with_implementation():
            for config in configs:
                config._attn_implementation_internal = name
            return call()

        return with_implementation

    def prefill(self, family: str, model) -> None:
        ids = self.ids(2, self.tokens[0])

        def run(model):
            def call():
                with torch.no_grad():
                    return model(ids, use_cache=False, logits_to_keep=16).logits

            return call

        self.compare(family, f"prefill 2 x {self.tokens[0]}", model, run)

    def training(self, family: str, model) -> None:
        ids = self.ids(2, self.tokens[1])

        def run(model):
            def call():
                model(ids, labels=ids, use_cache=False).loss.backward()
                model.zero_grad(set_to_none=True)

            return call

        self.compare(family, f"training step 2 x {self.tokens[1]}", model, run)

    def padded(self, family: str, model) -> None:
        length = self.tokens[2]
        ids, real = (
            self.ids(8, length),
            torch.linspace(length // 8, length, 8).long().to(self.device),
        )
        mask = (torch.arange(length, device=self.device) >= length - real[:, None]).long()

        def run(model):
            def call():
                with torch.no_grad():
                    return model(ids, attention_mask=mask, use_cache=False, logits_to_keep=1).logits

            return call

        self.compare(family, f"left-padded 8 x {length}", model, run)

    def static(self, family: str, model, graph: bool) -> None:
        places = self.tokens[3]
        prompt, token = self.ids(8, places // 4), self.ids(8, 1)

        def run(model):
            cache = transformers.StaticCache(config=model.config, max_cache_len=places)
            with torch.no_grad():
                model(prompt, past_key_values=cache, logits_to_keep=1)

            at = torch.full((1, 1), places // 4, device=self.device)

            def call():
                for layer in (
                    cache.layers
                ):  # write to the same place again, so that the cache stays a quarter full
                    layer.cumulative_length.fill_(places // 4)
                with torch.no_grad():
                    return model(
                        token, past_key_values=cache, position_ids=at, logits_to_keep=1
                    ).logits

            return call

        what = f"decode 8, cache {places // 4} of {places}"
        self.compare(family, f"{what}{', graph' if graph else ''}", model, run, graph)


def command_line(args: argparse.Namespace) -> str:
    """The command that measures these rows again, without the place of the output."""
    words = [
        "python benchmarks/bench_integrations.py",
        "--device",
        args.device,
        "--seconds",
        f"{args.seconds:g}",
    ]
    return " ".join(words + (["--only", *args.only] if args.only != list(families(SMALL)) else []))


def stored(rows: list[dict], dtype: str) -> dict:
    """The rows in the form of results.py. A step that failed is stored as a fact with the
    reason."""
    cases, facts = [], []
    for row in rows:
        if "failed" in row:
            fact = {"group": row["family"], "label": row["step"], "value": 1.0, "unit": "failure"}
            facts.append(fact | {"note": " ".join(row["failed"].split())})
            continue
        peer = {"us": 1e3 * row["peer_ms"], "spread": row["peer_spread"] / row["peer_ms"]}
        worst = f"worst token {row['worst']:.4g}/{row['peer_worst']:.4g}" if "worst" in row else ""
        case = {
            "group": row["family"],
            "label": row["step"],
            "dtype": dtype,
            "us": 1e3 * row["ours_ms"],
        }
        case |= {
            "spread": row["ours_spread"] / row["ours_ms"],
            "error": row.get("error"),
            "unit": "",
            "note": worst,
        }
        cases.append(case | {"peers": {row["peer"]: peer | {"error": row.get("peer_error")}}})
    return {"rows": cases, "facts": facts}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument(
        "--only", nargs="+", choices=list(families(SMALL)), default=list(families(SMALL))
    )
    parser.add_argument("--seconds", type=float, default=1.0, help="for each row")
    parser.add_argument(
        "--save", type=Path, nargs="?", const=RESULTS, metavar="FOLDER",
        help="stores each row as soon as it is measured, in benchmarks/results/ or another folder",
    )  # fmt: skip
    args = parser.parse_args()
    integration.register()
    bench = Bench(args.device, args.seconds)
    device = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    stamp = {
        "driver": nvidia_driver() if args.device == "cuda" else "",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": datetime.date.today().isoformat(),
        "command": command_line(args),
    }
    print(
        "; ".join([device, *stamp.values()])
        + "; ms; ratio > 1: ours is faster; error of the middle and the worst token (peer's)"
    )
    # Some families replace their own rows; all replace the whole table.
    part = args.save and args.only != list(families(SMALL))
    before = results.stored(args.save, device).get("transformers") if part else None
    if before is not None:  # a step that failed may run now
        before["facts"] = [fact for fact in before["facts"] if fact["group"] not in args.only]
    said: list[str] = []
    started = time.perf_counter()
    for family in args.only:
        model = build(family, bench.size, args.device, bench.dtype)
        steps = {"prefill": bench.prefill, "training step": bench.training}
        if family == "llama":
            steps |= {
                "left-padded": bench.padded,
                "decode": lambda f, m: bench.static(f, m, graph=False),
            }
            if args.device == "cuda":
                steps["decode, graph"] = lambda f, m: bench.static(f, m, graph=True)
        for name, step in steps.items():
            try:
                step(family, model)
            except (
                RuntimeError,
                ValueError,
                TypeError,
            ) as error:  # this row is missing, and the others run
                bench.rows.append({"family": family, "step": name, "failed": str(error)[:300]})
                words = str(error).splitlines()[0][:200]
                print(f"{family:12} {name:28} failed: {type(error).__name__}: {words}", flush=True)
            if args.save:
                made = stored(bench.rows, "bf16" if args.device == "cuda" else "f32")
                whole, said = results.merged(before, stamp | made)
                results.store(args.save, device, "transformers", whole)
        del model
        if args.device == "cuda":
            # raises if a kernel has failed, because nothing measured after it would count
            torch.cuda.empty_cache()
    for line in said:
        print(line)
    print(f"{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
