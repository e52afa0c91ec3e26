# SPDX-License-Identifier: BSD-3-Clause
"""estimate: a model of the time of a training step on many GPUs, for planning.

The time is that of one GPU's share of the FLOPs, plus the communication that the FLOPs cannot hide.
The bytes are those of the ring algorithms: an all-gather or reduce-scatter of n bytes over W ranks
moves n (W - 1) / W per rank, an all-reduce twice that.
"""

import dataclasses

__all__ = ["Estimate", "Machine", "estimate"]


@dataclasses.dataclass(frozen=True)
class Machine:
    """A cluster. The defaults describe nodes of 8 H100, without NVLink multicast.

    Attributes:
        tflops: TFLOP/s that a GPU sustains in large 16-bit products.
        attn_tflops: TFLOP/s that a GPU sustains in attention, forward and backward together.
        link_gbs: GB/s per direction between a GPU and the others of its node.
        net_gbs: GB/s per direction between a GPU and other nodes.
        node: GPUs per node.
        latency_us: the time in us that a layer's attention over ranks takes beside FLOPs and bytes,
            forward and backward together: host time, copies inside a GPU and waits between ranks.
            900 in eager Python on two H200.
    """

    tflops: float = 680.0
    attn_tflops: float = 560.0
    link_gbs: float = 360.0
    net_gbs: float = 45.0
    node: int = 8
    latency_us: float = 0.0


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The estimate of a step: times in milliseconds, and the bytes that a GPU sends.

    `step_ms` is the sum of the times. `efficiency` is the share of it that products and attention
    take. context, tensor and data name the kinds of parallelism that communicate.
    """

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
            loss are left out.
        seq_len: tokens per sequence.
        sequences: sequences per step, over all GPUs.
        data, tensor, context: ranks of data, tensor and context parallelism; the number of GPUs is
            their product. Tensor ranks are innermost, then context, then data. A kind of
            parallelism whose ranks do not fit into a node uses the network.
        is_causal: whether a causal mask removes half of the pairs of query and key.
        bytes_each: bytes per element of activations, K, V and gradients that are sent.
        hidden_share: the share of the communication, 0 to 1, that FLOPs can hide if there are
            enough of them.
        machine: the speeds of GPUs and links.

    Returns:
        An `Estimate`. It assumes that all GPUs have equal work without idle time, and leaves out
        norms and the optimizer.

    Raises:
        ValueError: a count is below 1, or hidden_share is outside 0 to 1.
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
    # a pair of query and key takes 4 FLOPs a column forward, and 2.5 times that backward
    attention_ms = (
        3.5 * 4 * layers * heads_q * head_dim * pairs / gpus / (machine.attn_tflops * 1e9)
    )

    own = tokens / data / context  # tokens per rank
    # K and V are gathered in forward and backward, their float32 gradients are scattered
    kv = layers * own * context * 2 * heads_kv * head_dim / tensor
    context_bytes = kv * (context - 1) / context * (2 * bytes_each + 4)
    # rows are gathered and scattered twice per layer, in forward and in backward
    tensor_bytes = layers * 8 * own * hidden * bytes_each * (tensor - 1) / tensor
    data_bytes = 2 * weights / tensor * bytes_each * (data * context - 1) / (data * context)

    def ms_left(sent: float, ranks: int, inner: int, beside_ms: float) -> float:
        """The time of sending these bytes that FLOPs of beside_ms cannot hide. inner: ranks of the
        kinds of parallelism inside this one."""
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
