# SPDX-License-Identifier: BSD-3-Clause
"""What a user of transformers sees: a Llama of 1.2e9 random weights after
`torch_gpukern.integrations.transformers.accelerate(model)`, beside the same model with "sdpa".

    python benchmarks/bench_whole_steps.py --device cuda [--rows prefill generate] [--save] [--resume]
    python benchmarks/bench_whole_steps.py --device cuda --recipe w4
    python benchmarks/bench_whole_steps.py --device cpu --size tiny --seconds 0.1

- prefill: one sequence of 1024, 8192 and 32768 tokens, no cache, the last token's logits.
- gradient step: forward, loss and backward of 4 x 2048 tokens, eager and compiled; on CUDA with the
  peak memory of a step.
- generate: 64 more tokens for 1 and for 16 prompts of 128 tokens, greedy, by transformers' own
  `generate`; with a dynamic cache, and with a static cache and a compiled step.

`accelerate` changes functions of transformers for the whole process. So each side is a process of
its own with its own copy of the model. Both stay alive. They compile and call a row for the first
time together, and then measure alternately, one at a time. The first row of a process is bound by
the host, so the shortest prefill runs before the rows and is neither printed nor stored.

Printed are medians of all calls, half the interquartile range, and the ratio of the medians. In a
prefill the error is the largest difference between the two sides' logits, over the largest logit.
--save stores each row in benchmarks/results/ as soon as it is measured, so that a run that is cut
short has stored some; with --resume the same command then measures the others. The peer's error is
stored as 0, because the error is the distance from it.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import multiprocessing
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from devices import nvidia_driver
from harness import RESULTS

from torch_gpukern import results

SIZES = {
    # hidden, layers, heads, heads_kv, inner, vocabulary; 1.24e9 weights with tied embeddings
    "full": dict(
        hidden_size=2048, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8,
        intermediate_size=8192, vocab_size=128256,
    ),
    "tiny": dict(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=128, vocab_size=256,
    ),
}  # fmt: skip
PROMPTS = {"full": (1024, 8192, 32768), "tiny": (16, 64, 128)}
STEP = {"full": (4, 2048), "tiny": (2, 32)}
DTYPES = {"cuda": "bf16", "cpu": "f32"}
GENERATED = {"full": (128, 64), "tiny": (8, 4)}  # tokens of a prompt, new tokens


def row_names(size: str) -> list[str]:
    batch, tokens = STEP[size]
    rows = [f"prefill {n}" for n in PROMPTS[size]]
    rows += [f"gradient step {batch} x {tokens}, {how}" for how in ("eager", "compiled")]
    for cache in ("dynamic cache", "static cache, compiled"):
        rows += [f"generate, {cache}, {n} requests" for n in (1, 16)]
    return rows


def not_stored(names: list[str], bench: dict | None, dtype: str, date: str) -> list[str]:
    """The rows that `bench`, as it is stored, does not have of this date."""
    rows = [] if bench is None else bench["rows"]
    stored = {
        name_of(row)
        for row in rows
        if row["dtype"] == dtype and row.get("date", bench["date"]) == date
    }
    return [name for name in names if plain(name) not in stored]


def plain(name: str) -> str:
    """The name without commas, which a stored row does not have between its group and its label."""
    return name.replace(",", "")


def name_of(case: dict) -> str:
    return plain(f"{case['group']} {case['label']}")


class Side:
    """A model in one process, and the calls that are measured."""

    def __init__(self, ours: bool, args: argparse.Namespace):
        import transformers

        self.size, self.device = args.size, args.device
        config = transformers.LlamaConfig(
            **SIZES[args.size], max_position_embeddings=65536, tie_word_embeddings=True,
            attention_dropout=0.0, pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
        torch.manual_seed(0)
        dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
        with torch.device(args.device):
            self.model = transformers.LlamaForCausalLM._from_config(
                config, attn_implementation="sdpa", dtype=dtype
            ).eval()
        self.said = ""
        if ours:
            from torch_gpukern.integrations.transformers import accelerate

            self.said = str(accelerate(self.model, args.recipe, say=None))
        elif args.recipe:
            self.said = "16 bits"

    def ids(self, batch: int, tokens: int) -> torch.Tensor:
        gen = torch.Generator().manual_seed(batch + tokens)
        words = SIZES[self.size]["vocab_size"]
        return torch.randint(3, words, (batch, tokens), generator=gen).to(self.device)

    def call(self, row: str) -> Callable[[], torch.Tensor | None]:
        """The call that a row measures. It returns the logits of a prefill, else None."""
        if row.startswith("prefill"):
            ids = self.ids(1, int(row.split()[1]))

            def prefill() -> torch.Tensor:
                with torch.inference_mode():
                    return self.model(ids, use_cache=False, logits_to_keep=1).logits

            return prefill
        if row.startswith("gradient"):
            ids, model = self.ids(*STEP[self.size]), self.model
            if "compiled" in row:
                torch._dynamo.reset()
                model = torch.compile(model)

            def step() -> None:
                model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
                self.model.zero_grad(set_to_none=True)

            return step
        prompt, new = GENERATED[self.size]
        ids = self.ids(int(row.split(", ")[-1].split()[0]), prompt)
        how = dict(max_new_tokens=new, min_new_tokens=new, do_sample=False)
        if "static" in row:
            torch._dynamo.reset()
            from transformers import CompileConfig

            # transformers compiles by itself on CUDA alone; this flag makes it compile elsewhere
            compiled = CompileConfig()
            compiled._compile_all_devices = True
            how |= dict(cache_implementation="static", compile_config=compiled)

        def generate() -> None:
            out = self.model.generate(ids, attention_mask=torch.ones_like(ids), **how)
            assert out.shape[1] == prompt + new

        return generate

    def ms(self, call: Callable) -> float:
        if self.device == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        if self.device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - begin) * 1e3


def serve(pipe: Connection, ours: bool, args: argparse.Namespace) -> None:
    """A side's process. Answers ("begin", row) and ("time", seconds)."""
    torch.set_num_threads(args.threads)
    side, call = None, None
    while True:
        try:
            what, given = pipe.recv()
        except EOFError:
            return
        try:
            if what == "make":
                side = Side(ours, args)
                pipe.send((True, side.said))
            elif what == "begin":
                call = side.call(given)
                first = call()  # compiles
                call()
                peak = 0.0
                if args.device == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                    call()
                    peak = torch.cuda.max_memory_allocated() / 1e9
                pipe.send((True, (None if first is None else first.float().cpu().numpy(), peak)))
            else:
                until, times = time.perf_counter() + given, []
                while not times or time.perf_counter() < until:
                    times.append(side.ms(call))
                pipe.send((True, times))
        except Exception:
            pipe.send((False, traceback.format_exc(limit=-3)))


class Failed(Exception):
    pass


def ask(pipe: Connection, what: str, given: object = None):
    pipe.send((what, given))
    ok, answer = pipe.recv()
    if not ok:
        raise Failed(answer)
    return answer


def ask_all(pipes: list[Connection], what: str, given: object = None) -> list:
    """Both sides work at the same time. Takes both answers before one that failed is raised, so that
    the next question does not meet an answer to this one."""
    for pipe in pipes:
        pipe.send((what, given))
    answers = [pipe.recv() for pipe in pipes]
    for ok, answer in answers:
        if not ok:
            raise Failed(answer)
    return [answer for _, answer in answers]


def measure(row: str, pipes: list[Connection], args: argparse.Namespace) -> dict:
    """The row in the form of results.py. Both sides compile at the same time, and then measure
    alternately."""
    (ours, our_peak), (theirs, their_peak) = ask_all(pipes, "begin", row)
    times: list[list[float]] = [[], []]
    for _ in range(args.rounds):
        for pipe, found in zip(pipes, times, strict=True):
            found += ask(pipe, "time", args.seconds / args.rounds)
    sides = []
    for found in times:
        low, middle, high = statistics.quantiles(found, n=4)
        sides.append({"us": 1e3 * middle, "spread": (high - low) / 2 / middle})
    step = next(step for step in ("prefill", "gradient step", "generate") if row.startswith(step))
    case = {"group": step, "label": row.removeprefix(step).strip(" ,"), "unit": ""}
    case |= {"dtype": DTYPES[args.device]} | sides[0]
    if ours is not None:
        case["error"] = float(abs(ours - theirs).max() / abs(theirs).max())
        sides[1]["error"] = 0.0
    if our_peak:
        case["note"] = f"memory {our_peak:.1f}/{their_peak:.1f} GB"
    return case | {"peers": {"sdpa": sides[1]}}


def table_line(case: dict) -> str:
    """The row as a line of a table."""

    def ms(side: dict) -> str:
        return f"{side['us'] / 1e3:.4g} +- {side['us'] / 1e3 * side['spread']:.2g}"

    error = f"{case['error']:.1e}" if "error" in case else ""
    cells = [f"{case['group']} {case['label']}", ms(case), ms(case["peers"]["sdpa"])]
    cells += [f"{results.ratio_of(case):.2f}", error, case.get("note", "")]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description="whole steps of a transformers model")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--size", choices=list(SIZES), default="full")
    parser.add_argument("--rows", nargs="+", metavar="WORD", help="rows with one of these words")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each row and side")
    parser.add_argument("--rounds", type=int, default=4, help="turns of each side in a row")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--recipe", help="quantises our side; generate and prefill only")
    parser.add_argument(
        "--save", type=Path, nargs="?", const=RESULTS, metavar="FOLDER",
        help="stores each row as soon as it is measured, in benchmarks/results/ or another folder",
    )  # fmt: skip
    parser.add_argument(
        "--resume", action="store_true", help="leaves out the rows that --save has stored today"
    )
    args = parser.parse_args()
    if args.resume and not args.save:
        parser.error("--resume leaves out stored rows: add --save")
    if args.save and args.recipe:
        parser.error("--save stores the rows in 16 bits: leave --recipe out")
    rows = [r for r in row_names(args.size) if not args.rows or any(w in r for w in args.rows)]
    if args.recipe:
        rows = [r for r in rows if not r.startswith("gradient")]
    device = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    dtype, today = DTYPES[args.device], datetime.date.today().isoformat()
    before = results.stored(args.save, device).get("whole_steps") if args.save else None
    if args.resume:
        rows = not_stored(rows, before, dtype, today)
    if not rows:
        print("no row is left to be measured")
        return
    context = multiprocessing.get_context("spawn")
    pipes, workers = [], []
    for ours in (True, False):
        here, there = context.Pipe()
        workers.append(context.Process(target=serve, args=(there, ours, args), daemon=True))
        workers[-1].start()
        there.close()
        pipes.append(here)
    said = ask_all(pipes, "make")
    import transformers

    words = [Path(sys.argv[0]).name, *sys.argv[1:]]
    stamp = {
        "driver": nvidia_driver() if args.device == "cuda" else "",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": today,
        "command": f"python benchmarks/{' '.join(words)}",
    }
    print(said[0])
    print("; ".join([device, *filter(None, stamp.values())]) + "\n")
    names = ["step", "gpukern, ms", "sdpa, ms", "ratio", "error", "memory, gpukern's/sdpa's"]
    print(f"| {' | '.join(names)} |\n|{'---|' * len(names)}")
    with contextlib.suppress(Failed):  # where it is asked for as a row, that says why
        measure(row_names(args.size)[0], pipes, args)
    cases, failed, notes = [], False, []
    for row in rows:
        try:
            cases.append(measure(row, pipes, args))
        except Failed as error:  # this row is missing, and the others run
            failed = True
            print(f"| {row} | failed | | | | |\n{error}", file=sys.stderr)
            continue
        print(table_line(cases[-1]), flush=True)
        if args.save:
            whole, notes = results.merged(before, stamp | {"rows": cases, "facts": []})
            results.store(args.save, device, "whole_steps", whole)
    print("\n".join(notes))
    for pipe, worker in zip(pipes, workers, strict=True):
        pipe.close()
        worker.join(10)
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
