# SPDX-License-Identifier: BSD-3-Clause
"""The shapes that the main benchmarks measure, and the bar that each group of them must reach.

Bars are ratios against the fastest peer in the same run, unless a unit says otherwise. A tuple of
lengths or sizes is one group of rows. Groups are named "<what> <which>", and a bench prints them in
this order.
"""

from harness import Bar

# ---- gemm: out [M, N] = a [M, K] @ b [K, N] ------------------------------------------------------

GEMM_SQUARE = (256, 512, 1024, 2048)
GEMM_ODD = (257, 513, 1023, 1025)
GEMM_SKINNY_M = (1, 4, 16, 64)
GEMM_SKINNY_KN = ((4096, 4096), (1024, 1024), (4097, 1025))
GEMM_ISA_SIZE = 1024

GEMM_BARS = {
    "square": Bar(geomean=1.00, each=0.93),
    "skinny": Bar(geomean=1.60, each=1.00),
    "odd": Bar(geomean=1.05),
}

GEMM_RANDOM_SIZES = (64, 8192)  # of m, n and k, log-uniform in multiples of 8
GEMM_RANDOM_BARS = {
    "cuda": {
        "geomean": Bar(at_least=1.03),
        "5th percentile": Bar(at_least=0.92),
        "worst": Bar(at_least=0.80),
    },
    "cpu": {"geomean": Bar(at_least=1.00), "5th percentile": Bar(at_least=0.90)},
}

# ---- flash_attn: the tokens of a batch are constant, so that short lengths also fill the machine -

ATTN_TOKENS = 4096
ATTN_LENGTHS = (512, 2048, 4096)
ATTN_HEADS = 4
ATTN_HEAD_DIMS = (64, 128)
ATTN_ISA_LENGTH = 1024
ATTN_MEMORY_LENGTH = 65536

FLASH_ATTN_BARS = {
    "forward full d64, f32": Bar(geomean=1.10, each=1.00),
    "forward full d64, bf16": Bar(geomean=1.80, each=1.40),
    "forward full d128, f32": Bar(geomean=1.10, each=1.00),
    "forward full d128, bf16": Bar(geomean=1.80, each=1.40),
    "forward causal, f32": Bar(geomean=1.30, each=1.05),
    "forward causal, bf16": Bar(geomean=2.00),
    "backward full, f32": Bar(geomean=1.10),
    "backward full, bf16": Bar(geomean=1.50),
    "backward causal, f32": Bar(geomean=1.25),
    "backward causal, bf16": Bar(geomean=1.60),
    "call forward+backward": Bar(each=1 / 1.3),
}

# ---- paged_attn: decode of one token per sequence, (batch, context) ------------------------------

PAGED_HEADS_Q, PAGED_HEADS_KV, PAGED_HEAD_DIM = 32, 8, 128
PAGED_BATCH_CONTEXT = ((1, 4096), (1, 16384), (4, 4096), (8, 8192))
PAGED_PAGE_SIZES = (16, 64)
# sequences, shared keys, own keys of each, tokens of a page
PREFIX_CASES = ((64, 2048, 128, 16), (8, 2048, 128, 16))
# sequences, old keys, new tokens of each, tokens of a page
TREE_CASES = ((8, 4096, 16, 16),)
PAGED_BAR = Bar(share=0.8)  # of reading the pages once, in the order of the table

# ---- the same on a GPU ---------------------------------------------------------------------------

CUDA_GEMM_SQUARE = (512, 1024, 2048, 4096, 8192, 16384)
CUDA_GEMM_WEIGHTS = ((4096, 4096), (28672, 4096), (4096, 14336))  # [N, K] of a linear layer
CUDA_GEMM_TALL_M = (512, 2048, 8192)
CUDA_GEMM_SKINNY_M = (1, 16, 64)
CUDA_GEMM_F16 = (4096, 8192)
CUDA_GEMM_ONE = 4096  # the size of rows that compare anything else
CUDA_GEMM_LORA_RANKS = (8, 16, 32, 64)
CUDA_GEMM_LORA_M = (1024, 4096, 16384)  # tokens
CUDA_GEMM_EXPERTS = (1, 8, 64, 128)
CUDA_GEMM_QUICK_SECONDS = 60.0
CUDA_GEMM_BARS = {
    "square bf16": Bar(geomean=1.05, each=0.97),
    "tall bf16": Bar(each=1.00),
    "skinny 4096x4096": Bar(each=1.20),
    "skinny 28672x4096": Bar(each=1.02),
    "skinny 4096x14336": Bar(each=1.05),
    "f16": Bar(geomean=1.05, each=0.97),
    "f32 ieee": Bar(each=0.95),
    "f32 tf32": Bar(each=0.95),
    "LoRA forward": Bar(geomean=1.00, each=0.85),
    "LoRA backward": Bar(geomean=1.00, each=0.85),
    "LoRA gradients": Bar(geomean=1.00, each=0.85),
    "router": Bar(geomean=1.00, each=0.85),
}
CUDA_GEMM_UNALIGNED_BAR = Bar(share=1 / 1.3)  # of our speed on the aligned neighbour
# (M, N, K) and the (M, N, K) of the aligned neighbour
CUDA_GEMM_UNALIGNED = (
    ((1023, 1023, 1023), (1024, 1024, 1024)),
    ((1025, 1025, 1025), (1024, 1024, 1024)),
    ((4095, 4095, 4095), (4096, 4096, 4096)),
    ((4097, 4097, 4097), (4096, 4096, 4096)),
    ((4097, 4099, 4095), (4096, 4096, 4096)),
    ((4096, 4096, 4100), (4096, 4096, 4096)),
    ((16, 4097, 4097), (16, 4096, 4096)),
)
CUDA_GEMM_PADDED = (512, 1024, 2048)  # cubes whose operands are both misaligned, NN and NT
CUDA_GEMM_FUSED_BAR = Bar(each=1.03)

CUDA_ATTN_TOKENS, CUDA_ATTN_HIDDEN = 16384, 2048
CUDA_ATTN_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
CUDA_ATTN_HEAD_DIMS = (64, 128, 256)
CUDA_ATTN_WIDE_DIM, CUDA_ATTN_WIDE_HEADS = 512, (8, 1)  # a global layer of Gemma 4
CUDA_ATTN_WIDE_LENGTHS = (2048, 8192)
CUDA_ATTN_DROPOUT_DIMS, CUDA_ATTN_DROPOUT_LENGTHS = (64, 128), (2048, 8192)
CUDA_ATTN_COMPILED = ((128, 2048), (128, 8192))  # (head_dim, seq) of rows with peers that compile
CUDA_ATTN_BARS = {
    "forward full": Bar(geomean=1.05, each=0.85),
    "forward causal": Bar(geomean=1.05, each=0.85),
    "backward full": Bar(geomean=1.05, each=0.85),
    "backward causal": Bar(geomean=1.05, each=0.85),
    "dropout forward full": Bar(each=0.8),
    "dropout forward causal": Bar(each=0.8),
    "dropout backward full": Bar(each=0.8),
    "dropout backward causal": Bar(each=0.8),
}

# bench_attn_masks.py: names of masks and biases, and lengths. FlexAttention compiles each row anew.
CUDA_ATTN_MASKS = (
    *(("causal", seq) for seq in (2048, 8192, 32768)),
    *(("documents", seq) for seq in (2048, 8192, 32768)),
    ("prefix", 8192),
    ("window", 8192),
    *(("sliding_global", seq) for seq in (8192, 32768)),
    ("images", 8192),
    ("question", 8192),
    ("tiles", 8192),
)
CUDA_ATTN_MASKS_WIDE_DIM = 256  # a local or global layer of Gemma 3
CUDA_ATTN_MASKS_WIDE = (
    *(("causal", seq) for seq in (2048, 8192)),
    *(("documents", seq) for seq in (2048, 8192)),
    ("prefix", 8192),
    ("window", 8192),
    *(("sliding_global", seq) for seq in (2048, 8192)),
    ("images", 8192),
)
CUDA_ATTN_BIASES_WIDE = (("bias", 2048), ("causal bias", 8192), ("keys' bias", 2048))
CUDA_ATTN_BIASES = (
    ("bias", 2048),
    ("bias", 8192),
    ("causal bias", 8192),
    ("keys' bias", 2048),
    ("distance", 2048),
)
CUDA_ATTN_MASKS_BACKWARD = (
    ("causal", 2048),
    ("causal", 8192),
    ("documents", 8192),
    ("window", 8192),
    ("sliding_global", 8192),
    ("question", 8192),
    ("tiles", 8192),
)
CUDA_ATTN_BIASES_BACKWARD = (("bias", 2048), ("bias grad", 2048), ("bias grad", 8192))
CUDA_ATTN_BIASES_BACKWARD_WIDE = (
    ("bias", 2048),
    ("bias grad", 2048),
    ("bias grad", 8192),
    ("shared bias grad", 2048),
    ("keys' bias grad", 2048),
    ("distance grad", 2048),
)
CUDA_ATTN_MASK_BARS = {
    "forward": Bar(geomean=1.9, each=1.4),
    "wide": Bar(geomean=1.9, each=1.4),
    "backward": Bar(geomean=1.5, each=1.3),
    "wide backward": Bar(geomean=1.5, each=1.3),
    "rule": Bar(each=0.72),
}
CUDA_MASK_BUILDER = Bar(at_most=60.0)

CUDA_PAGED_BATCH_CONTEXT = ((1, 6144), (1, 8192), (8, 8192), (1, 131072), (64, 4096), (256, 1024))
CUDA_PAGED_RAGGED = (65536, 31, 4096)  # one long sequence and 31 others
CUDA_TREE_CASES = (
    (8, 4096, 16, 16),
    (1, 8192, 16, 16),
    (64, 4096, 16, 16),
    (64, 4096, 64, 16),
    (8, 4096, 16, 64),
    (1, 8192, 16, 64),
    (64, 4096, 16, 64),
    (64, 4096, 64, 64),
)
CUDA_PREFIX_CASES = (
    (64, 8192, 512, 16),
    (64, 8192, 512, 64),
    (64, 2048, 128, 16),
    (8, 8192, 512, 16),
    (8, 1024, 128, 16),
    (256, 1024, 128, 16),
    (2, 8192, 512, 16),
)
CUDA_PAGED_BARS = {(1, 8192): Bar(rate=1400.0, firm=True), (64, 4096): Bar(rate=3400.0, firm=True)}
# latent attention (DeepSeek V2 and V3): (batch, context), and the heads of a rank
CUDA_LATENT_BATCH_CONTEXT = ((1, 4096), (1, 65536), (16, 16384), (64, 4096), (128, 4096))
CUDA_LATENT_HEADS = (16, 64, 128)
CUDA_WRITE_TOKENS = 65536
CUDA_WRITE_BAR = Bar(share=0.8)  # of copying as many bytes
CUDA_CALL = Bar(at_most=12.0)  # us of host time, small eager call without grad

# ---- the demo's model ----------------------------------------------------------------------------

MODEL_BATCH = {"cpu": 8, "cuda": 32}
MODEL_DECODE_BATCH = {"cpu": 8, "cuda": 64}
MODEL_LORA_RANKS = (16, 64)
MODEL_BARS = {"gradient step": Bar(each=1.10)}

# ---- cost of use ---------------------------------------------------------------------------------

CALL_OVER_MUL = Bar(at_most=10.0)  # us of host time above torch.mul, small eager call without grad
ISA_SHARE = {"gemm": Bar(at_least=60.0), "flash_attn": Bar(at_least=40.0)}  # percent of the peak
MEMORY_BEYOND_TENSORS = Bar(at_most=200.0)  # MB
