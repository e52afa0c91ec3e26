# SPDX-License-Identifier: BSD-3-Clause
"""estimate: a model of a training step's time over many GPUs, for a first look before any is
rented.

A step's time is that of its FLOPs on one GPU's share plus what of its communication the FLOPs
cannot hide. Bytes are those of the algorithms: a ring's all-gather or reduce-scatter of n bytes
over W ranks moves n (W - 1) / W a rank, an all-reduce twice that.
"""

import dataclasses

__all__ = ["Estimate", "Machine", "estimate"]


@dataclasses.dataclass(frozen=True)
class Machine:
    """What a model of time has to know of a cluster; the defaults are those of 8 H100 a node,
    without NVLink multicast.

    Attributes:
        tflops: TFLOP/s that a GPU keeps up in large 16-bit products.
        attn_tflops: likewise in attention, forward and backward together.
        link_gbs: GB/s a direction that a GPU has to the others of its node.
        net_gbs: GB/s a direction that a GPU has to other nodes.
        node: GPUs a node.
        latency_us: what a layer's attention over ranks takes beside FLOPs and bytes, forward and
            backward together: host time of its calls, copies inside a GPU and waiting for each
            other. 900 in eager Python on two H200.
    """

    tflops: float = 680.0
    attn_tflops: float = 560.0
    link_gbs: float = 360.0
    net_gbs: float = 45.0
    node: int = 8
    latency_us: float = 0.0


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Times in milliseconds, bytes a GPU; `step_ms` is their sum, `efficiency` the share of it in
    which FLOPs are done."""

    gpus: int
    products_ms: float
    attention_ms: float
    context_ms: float
    tensor_ms: float
    data_ms: float
    context_bytes: float
    tensor_bytes: float
    data_bytes: float

    @property
    def step_ms(self) -> float:
        return (
            self.products_ms + self.attention_ms + self.context_ms + self.tensor_ms + self.data_ms
        )

    @property
    def efficiency(self) -> float:
        return (self.products_ms + self.attention_ms) / self.step_ms


def estimate(
    *,
    layers: int,
    hidden: int,
    intermediate: int,
    heads_q: int,
    heads_kv: int,
    head_dim: int,
    seq_len: int,
    sequences: int,
    data: int = 1,
    tensor: int = 1,
    context: int = 1,
    is_causal: bool = True,
    bytes_each: int = 2,
    hidden_share: float = 0.9,
    machine: Machine = Machine(),
) -> Estimate:
    """The time of one training step (forward and backward) of a dense transformer with gated MLPs.

    Args:
        layers, hidden, intermediate, heads_q, heads_kv, head_dim: the model; embeddings and the
        loss are left out. seq_len: tokens of a sequence.
        sequences: sequences of a step, over all GPUs.
        data, tensor, context: ranks of data, tensor and context parallelism; the GPUs are their
            product. Tensor ranks lie innermost, then context, then data: a form whose ranks do not
            fit into a node goes by the network.
        is_causal: whether half of the pairs of query and key fall away.
        bytes_each: bytes of an activation, of K and V, and of a gradient that is sent.
        hidden_share: the most of communication that FLOPs can hide beside it, where there are
        enough of them. machine: what the GPUs and links do.

    Returns:
        An `Estimate`. It assumes equal shares, no bubble, no time for norms and the optimizer.

    Raises:
        ValueError: a count below 1, or a hidden_share outside 0 to 1.
    """
    counts = dict(
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        heads_q=heads_q,
        heads_kv=heads_kv,
        head_dim=head_dim,
        seq_len=seq_len,
        sequences=sequences,
        data=data,
        tensor=tensor,
        context=context,
        bytes_each=bytes_each,
    )
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"estimate: {name} must be at least 1, got {count}")
    if not 0 <= hidden_share <= 1:
        raise ValueError(f"estimate: hidden_share must be between 0 and 1, got {hidden_share}")
    gpus = data * tensor * context
    tokens = seq_len * sequences
    weights = layers * (
        hidden * head_dim * (2 * heads_q + 2 * heads_kv) + 3 * hidden * intermediate
    )
    products_ms = 6 * weights * tokens / gpus / (machine.tflops * 1e9)
    pairs = sequences * seq_len * seq_len / (2 if is_causal else 1)
    attention_ms = (
        3.5 * 4 * layers * heads_q * head_dim * pairs / gpus / (machine.attn_tflops * 1e9)
    )

    own = tokens / data / context  # tokens of a rank, whole in hidden
    # K and V gathered forward and backward, their float32 gradients scattered
    kv = layers * own * context * 2 * heads_kv * head_dim / tensor
    context_bytes = kv * (context - 1) / context * (2 * bytes_each + 4)
    # rows gathered and scattered twice a layer, forward and backward
    tensor_bytes = layers * 8 * own * hidden * bytes_each * (tensor - 1) / tensor
    data_bytes = 2 * weights / tensor * bytes_each * (data * context - 1) / (data * context)

    def ms_left(sent: float, ranks: int, inner: int, beside_ms: float) -> float:
        speed = machine.link_gbs if ranks * inner <= machine.node else machine.net_gbs
        took = sent / (speed * 1e6)
        return max(took - hidden_share * min(took, beside_ms), 0.0) if ranks > 1 else 0.0

    return Estimate(
        gpus,
        products_ms,
        attention_ms,
        ms_left(context_bytes, context, tensor, attention_ms)
        + (layers * machine.latency_us / 1e3 if context > 1 else 0.0),
        ms_left(tensor_bytes, tensor, 1, products_ms),
        ms_left(data_bytes, data * context, tensor, products_ms * 2 / 3),
        context_bytes if context > 1 else 0.0,
        tensor_bytes if tensor > 1 else 0.0,
        data_bytes if data * context > 1 else 0.0,
    )
