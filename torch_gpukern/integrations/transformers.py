# SPDX-License-Identifier: BSD-3-Clause
"""transformers: ``attn_implementation="gpukern"`` after `register`.

transformers asks for a mask once in a forward pass and hands it to every layer. Most masks are a
causal rule, a window, and one interval of keys for each sequence. `_mask` answers with a `Rule` of
these three, packed into a small int32 tensor, and no matrix is made. Every other mask stays a
matrix. `_attention` passes a bool matrix to `flash_attn` as attn_mask and a float matrix as bias. It
refuses anything else by name.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers import masking_utils as hf

from .._library import are_deterministic
from ..masks import attn_mask_of
from ..ops import flash_attn, flash_attn_varlen
from ..ops.fakes import stats_dtype
from .transformers_accelerate import Accelerated, change
from .transformers_experts import register_experts
from .transformers_latent import LatentCache, latent_layer_of

__all__ = ["Accelerated", "LatentCache", "accelerate", "register", "register_continuous_batching"]


def accelerate(
    model: torch.nn.Module,
    quantise: str | None = None,
    loss: bool = True,
    *,
    say: Callable[[str], object] | None = print,
) -> Accelerated:
    """Puts everything that gpukern has for a transformers model into it, in place.

    ::

        model = AutoModelForCausalLM.from_pretrained(path)
        done = torch_gpukern.integrations.transformers.accelerate(model)
        done.restore()

    - The attention is ``attn_implementation="gpukern"`` (see `register`).
    - Linear layers, norms and gated MLPs are replaced by `torch_gpukern.nn.patch`, GPT-2's Conv1D
      by one product.
    - The rotary embedding of the model's family becomes `rope`. It is a function of the family's
      module, so other models of the family in the process use it, too.
    - Mixtures of experts are multiplied by `grouped_gemm`.
    - Latent attention (DeepSeek's) without gradients attends over the cache's latents where that is
      less work than expanding them, as for each new token. `LatentCache` stores them for that.
    - A causal model that is given labels computes its loss by `linear_cross_entropy`. Its logits
      are then None.

    A part that would compute something else is left as it is, with a reason. Results agree with
    the model's own within the rounding of its dtype. A second call changes nothing.

    Args:
        model: a transformers model, or a module around one (PEFT's, for one).
        quantise: a recipe of `torch_gpukern.nn.quantize` that needs no calibration. Embeddings,
            heads (classifiers, too) and routers stay.
        loss: whether the loss of causal models is replaced.
        say: called with each line of the report; None prints nothing.

    Returns:
        `Accelerated`, whose ``restore()`` undoes all of it.

    Raises:
        TypeError: there is no transformers model in `model`.
        ValueError: no such recipe. If accelerate raises, nothing is changed.
    """
    inner = (
        next((m for m in model.modules() if isinstance(m, PreTrainedModel)), None)
        if isinstance(model, torch.nn.Module)
        else None
    )
    if inner is None:
        raise TypeError(
            f"gpukern accelerate: model must be a transformers model or contain one, got "
            f"{type(model).__name__}; torch_gpukern.nn.patch takes any module"
        )
    register()
    done = Accelerated(inner)
    try:
        change(done, "gpukern", register_experts, quantise, loss)
    except BaseException:
        done.restore()
        raise
    if say is not None:
        for line in str(done).splitlines():
            say(f"gpukern: {line}")
    return done


def register(name: str = "gpukern") -> None:
    """Adds gpukern's attention to transformers: then ``attn_implementation=name`` is taken wherever
    "sdpa" is.

    ::

        torch_gpukern.integrations.transformers.register()
        model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="gpukern")
        model.set_attn_implementation("gpukern")  # or later

    Supported in training and inference, eager and compiled: causal and bidirectional attention,
    sliding windows, softcap, sinks, grouped heads, Dv != D, padding on either side, dynamic and
    static caches, chunked prefill and later turns of a chat over a cache, packed sequences (by
    position_ids or cu_seq_lens_q), masks that are matrices, custom mask functions, blocks of tokens
    that see each other, chunked attention, position biases, and padding between tokens.

    The forward pass raises ValueError for output_attentions and sparse indices, and says what to use
    instead. Compiled code cannot look at a mask's values. There, packed position_ids, blocks and
    padding between tokens raise when the model runs (on CUDA as a failed device assertion).

    Args:
        name: the name to register. transformers reserves names with "flash" in them for packages.

    Raises:
        ValueError: a name with "flash" in it.
        ImportError: a transformers whose mask interface differs.
    """
    if "flash" in name:
        raise ValueError(
            f"register: name is '{name}'; transformers takes names with 'flash' for its own "
            f"packages"
        )
    if not {"q_length", "q_offset"} <= set(hf.sdpa_mask.__annotations__):
        import transformers

        raise ImportError(
            f"torch_gpukern: transformers {transformers.__version__} has another mask interface: "
            "pip install --upgrade transformers"
        )
    AttentionInterface.register(name, _attention_of_parts)
    AttentionMaskInterface.register(name, _mask)


def _refuse(what: str, instead: str) -> ValueError:
    return ValueError(f"gpukern attention: {what}; {instead}")


_EAGER = 'use attn_implementation="eager"'
_SDPA = 'use attn_implementation="sdpa" or "eager"'


# ---- the rule, as a tensor -----------------------------------------------------------------------

# transformers hands a mask to a layer only if it is a tensor of four dimensions. Compiled code may
# read a tensor's sizes, but not its values. So a Rule's tensor is [B, heads, kind, values]:
#
# - dimension 2 has kind + 1 elements, where kind is a sum of the bits below;
# - dimension 1 has _NO_HEADS elements, or _NO_HEADS + 1 + window if there is a window;
# - the values are the Rule's tensors (first, end and so on), which only the device knows.
#
# Dimensions 1 and 2 have stride 0, so the tensor has the memory of its values. No model has
# _NO_HEADS heads or more: if a model with an attention of its own adds this tensor to its scores,
# the addition fails instead of giving wrong results.
_NO_HEADS = 257
_CAUSAL, _BOUNDED, _TOP_LEFT, _POSITIONED, _PACKED, _GUESSED = (1 << i for i in range(6))


class Rule(NamedTuple):
    """Which keys a query sees.

    Query i of sequence b has the position of key ``i + q_start[b]``. Without q_start, the last query
    has the position of the last key; if top_left, the first query has that of the first key. A query
    sees the keys in ``[first[b], end[b])`` that are at most `window` keys away from its position. If
    causal, it sees none behind its position.
    """

    causal: bool
    window: int | None = None
    top_left: bool = False
    first: Tensor | None = None  # [B] int32
    end: Tensor | None = None  # [B] int32
    q_start: Tensor | None = None  # [B] int32
    cu_seqlens: Tensor | None = None  # [N + 1] int32: the batch is packed sequences
    # [B] int32: compiled code guessed the rule, and this is 1 where the guess is right (`_guess_holds`)
    holds: Tensor | None = None

    def to_tensor(self, batch: int, device: torch.device | str) -> Tensor:
        """[B, heads, kind, values] int32, as described above; a packed batch has B = 1."""
        kind = _CAUSAL * self.causal + _TOP_LEFT * self.top_left
        columns = []
        for bit, values in (
            (_BOUNDED, (self.first, self.end)),
            (_POSITIONED, (self.q_start,)),
            (_GUESSED, (self.holds,)),
            (_PACKED, (self.cu_seqlens,)),
        ):
            if values[0] is not None:
                kind += bit
                columns += values
        if self.cu_seqlens is not None:
            values = self.cu_seqlens[None]
        elif columns:
            values = torch.stack([c.to(torch.int32).expand(batch) for c in columns], 1)
        else:
            values = torch.zeros(batch, 1, dtype=torch.int32, device=device)
        width = _NO_HEADS if self.window is None else _NO_HEADS + 1 + self.window
        return values[:, None, None].expand(-1, width, kind + 1, -1)

    @classmethod
    def from_tensor(cls, mask: Tensor) -> "Rule":
        if not is_rule(mask):
            what = (
                f"{tuple(mask.shape)} {mask.dtype}"
                if isinstance(mask, Tensor)
                else type(mask).__name__
            )
            raise _refuse(
                f"attention_mask is neither a bool nor a float matrix ({what})",
                "pass a padding mask [batch, keys], packed sequences by position_ids or "
                "cu_seq_lens_q, or " + _SDPA,
            )
        kind, width, values = mask.shape[2] - 1, mask.shape[1] - _NO_HEADS, mask[:, 0, 0]
        found = {"causal": bool(kind & _CAUSAL), "window": width - 1 if width else None}
        if kind & _PACKED:
            return cls(**found, cu_seqlens=values[0])
        columns = iter(values.unbind(1))
        if kind & _BOUNDED:
            found |= {"first": next(columns), "end": next(columns)}
        if kind & _POSITIONED:
            found["q_start"] = next(columns)
        if kind & _GUESSED:
            found["holds"] = next(columns)
        return cls(**found, top_left=bool(kind & _TOP_LEFT))


def is_rule(mask: Any) -> bool:
    return (
        isinstance(mask, Tensor)
        and mask.dtype is torch.int32
        and mask.dim() == 4
        and mask.shape[1] >= _NO_HEADS
    )


# ---- from transformers' mask to a rule -----------------------------------------------------------

# Models (config.model_type) whose attention changes the elements of the mask, most of them to hide
# keys that an indexer did not choose. They get a matrix.
MATRICES = frozenset(
    (
        "axk2",
        "deepseek_v32",
        "deepseek_v4",
        "doge",
        "dots3_note_text",
        "glm5_next_text",
        "glm_moe_dsa",
        "hy_v4",
        "hy_v4_vl_text",
        "mistral_large4_text",
        "qwen4_exp_text",
    )
)
# Those of them that expect a float matrix of 0 and the lowest number, as "eager" has it.
FLOATS = frozenset(("deepseek_v4",))


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = hf.causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    config: object = None,
    **kwargs,
) -> Tensor | None:
    """transformers' mask interface. Query i has position ``q_offset + i``, key j position
    ``kv_offset + j``. mask_function(batch, head, query position, key position) is True if the query
    sees the key. attention_mask is [B, positions] bool, True for tokens.
    """
    dense = partial(
        _dense,
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        local_size=local_size,
        use_vmap=use_vmap,
        device=device,
    )
    kind = getattr(config, "model_type", None)
    if kind in FLOATS:
        seen = dense()
        dtype = kwargs["dtype"]
        return torch.where(
            seen, torch.zeros((), dtype=dtype, device=device), torch.finfo(dtype).min
        )
    if kind in MATRICES:
        return dense()
    if use_vmap:  # or_mask_function, and_mask_function
        return _of_no_heads(dense())
    if (
        mask_function is hf.bidirectional_mask_function
        and attention_mask is None
        and kwargs.get("allow_is_bidirectional_skip")
    ):
        return None  # as for "sdpa": BEiT adds its bias to a mask if there is one
    try:
        rule, packed = _rule_of(mask_function, kv_offset + kv_length, local_size, config, kwargs)
    except _NoRule:
        return _of_no_heads(dense())
    if packed is not None:
        return rule._replace(cu_seqlens=_cu_seqlens(packed.expand(batch_size, -1))).to_tensor(
            1, device
        )
    checks = []  # [B] bool each: whether what compiled code assumes is true
    if rule.holds is not None:
        checks.append(
            _guess_holds(
                rule, mask_function, batch_size, q_length, kv_length, q_offset, kv_offset, device
            )
        )
    if attention_mask is not None:
        try:
            first, end, one_run, hides = _bounds(
                attention_mask, q_length, kv_length, q_offset, kv_offset, rule.causal
            )
        except _NoRule:
            return _of_no_heads(dense())
        if hides:
            rule = rule._replace(first=first, end=end)
            if one_run is not None:
                checks.append(one_run)
    if checks:
        rule = rule._replace(holds=torch.stack(checks).all(0))
    if rule.causal or rule.window is not None:
        rule = _with_positions(rule, q_offset - kv_offset, batch_size, q_length, kv_length, device)
    return rule.to_tensor(batch_size, device)


class _NoRule(Exception):
    """The mask cannot be written as a Rule."""


def _dense(device: torch.device | str, **how: Any) -> Tensor:
    """The mask as a bool matrix [B, 1, Sq, Sk], as "sdpa" gets it."""
    return hf.sdpa_mask(
        **how, device=device, allow_is_causal_skip=False, allow_is_bidirectional_skip=False
    )


def _of_no_heads(matrix: Tensor) -> Tensor:
    """The matrix repeated at stride 0 for a number of heads that no model has. A model that adds a
    bool matrix to its own scores would add 1 for True and hide nothing. With this shape the addition
    fails."""
    return matrix.expand(-1, _NO_HEADS, -1, -1)


def _with_positions(
    rule: Rule, diagonal: int | Tensor, batch: int, q_length: int, kv_length: int, device
) -> Rule:
    """The rule with q_start or top_left, so that query i has the position of key ``diagonal + i``."""
    if not isinstance(diagonal, Tensor):
        if diagonal + q_length == kv_length:
            return rule
        if diagonal == 0:
            return rule._replace(top_left=True)
        q_start = torch.full((batch,), diagonal, dtype=torch.int32, device=device)
    else:
        q_start = diagonal.to(torch.int32).reshape(-1).expand(batch)
    return rule._replace(q_start=q_start)


def _rule_of(mask_function, positions, local_size, config, kwargs) -> tuple[Rule, Tensor | None]:
    """(the rule of a mask function, the number of the sequence of each token [B, S] if sequences are
    packed). Raises _NoRule if there is no such rule.

    If the rule is a guess, its `holds` is True, which the caller replaces by a tensor.
    """
    if mask_function is hf.causal_mask_function:
        return Rule(causal=True), None
    if mask_function is hf.bidirectional_mask_function:
        return Rule(causal=False), None
    # A compiler knows a function's name, but not its closure. So the rule is guessed from the
    # config.
    if torch.compiler.is_compiling():
        causal = "allow_is_bidirectional_skip" not in kwargs
        chunk = getattr(config, "attention_chunk_size", None)
        if (
            local_size is not None
            and local_size == chunk
            and local_size != getattr(config, "sliding_window", None)
        ):
            if positions > local_size:
                raise _NoRule
            local_size = None
        window = None if local_size is None else local_size - 1 if causal else local_size
        return Rule(causal, window, holds=True), None  # type: ignore[arg-type]
    found = _parts(mask_function)
    packed = found.pop("packed_sequence_mask_function", None)
    found.pop("remap_positions_for_packed_sequence", None)
    if "chunked_overlay" in found:
        if positions > local_size or packed is not None:
            raise _NoRule
        del found["chunked_overlay"]
    names = set(found)
    if names == {"causal_mask_function"}:
        return Rule(causal=True), packed
    if names == {"sliding_window_overlay", "causal_mask_function"}:
        return Rule(causal=True, window=found["sliding_window_overlay"] - 1), packed
    if names == {"bidirectional_mask_function"}:
        return Rule(causal=False), packed
    if names == {"sliding_window_bidirectional_overlay", "bidirectional_mask_function"}:
        return Rule(causal=False, window=found["sliding_window_bidirectional_overlay"]), packed
    raise _NoRule


def _parts(mask_function: Callable) -> dict:
    """The mask functions of transformers that a mask function intersects, by name, each with the
    value in its closure (a window, for one). A union of functions has the name or_masks, too.
    """
    name = mask_function.__qualname__.split(".<locals>")[0]
    closure = [cell.cell_contents for cell in mask_function.__closure__ or ()]
    if name in ("and_masks", "or_masks"):
        parts = {} if name == "and_masks" else {"or_masks": None}
        inner = closure[0]
    else:
        parts = {name: next((x for x in closure if not callable(x)), None)}
        inner = [f for f in closure if callable(f)]
    for function in inner:
        parts |= _parts(function)
    return parts


def _cu_seqlens(packed: Tensor) -> Tensor:
    """Offsets of the packed sequences in B * S tokens, and B * S. packed [B, S] numbers the
    sequences of each row in increasing order."""
    begins = torch.ones_like(packed, dtype=torch.bool)
    begins[:, 1:] = packed[:, 1:] != packed[:, :-1]
    starts = begins.flatten().nonzero().flatten()
    return torch.cat([starts, starts.new_tensor([packed.numel()])]).to(torch.int32)


def _bounds(tokens, q_length, kv_length, q_offset, kv_offset, causal):
    """(first, end, one_run, hides) of a padding mask.

    first, end: [B], the interval of keys of each sequence that are tokens.
    one_run: [B] bool, whether these keys have no padding between them; for compiled code, which
        checks it when the model runs. Otherwise None, and a mask with holes raises _NoRule.
    hides: whether the mask hides a key that the causal rule does not hide.
    """
    seen = tokens[:, kv_offset : kv_offset + kv_length]
    place = torch.arange(seen.shape[1], device=tokens.device)
    count = seen.sum(1)
    first = seen.to(torch.int32).argmax(1) if seen.shape[1] else torch.zeros_like(count)
    end = first + count
    one_run = (seen == ((place >= first[:, None]) & (place < end[:, None]))).all(1)
    if torch.compiler.is_compiling():
        return first, end, one_run, True
    # The mask may be shorter than the keys of a static cache. Keys behind its end are hidden, which
    # the causal rule does already if the mask reaches the last query.
    whole = seen.shape[1] == kv_length or (
        causal and not isinstance(q_offset, Tensor) and tokens.shape[1] >= q_offset + q_length
    )
    one_runs, no_padding = torch.stack([one_run.all(), seen.all()]).tolist()
    if not one_runs:
        raise _NoRule
    return first, end, None, not (whole and no_padding)


def _guess_holds(
    rule, mask_function, batch, q_length, kv_length, q_offset, kv_offset, device
) -> Tensor:
    """[B] bool: whether mask_function agrees with the guessed rule. It is asked at both ends of each
    query's interval of keys, just inside and just outside. Packed sequences, chunks and blocks that
    see each other disagree there.
    """
    query = (torch.arange(q_length, device=device) + q_offset).view(1, 1, -1, 1)
    batch_index = torch.arange(batch, device=device).view(-1, 1, 1, 1)
    head_index = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=device)
    least, last = kv_offset, kv_offset + kv_length - 1
    low = torch.full_like(query, least) if rule.window is None else query - rule.window
    if rule.causal:
        high = query
    elif rule.window is None:
        high = torch.full_like(query, last)
    else:
        high = query + rule.window
    holds = torch.ones(batch, dtype=torch.bool, device=device)
    for key, sees in ((low, True), (low - 1, False), (high, True), (high + 1, False)):
        if sees:
            key = key.clamp(least, last)
        exists = (key >= least) & (key <= last) & (query <= last)
        shown = mask_function(batch_index, head_index, query, key.clamp(least, last))
        agrees = shown if sees else ~shown
        holds = holds & (agrees | ~exists).expand(batch, 1, q_length, 1).flatten(1).all(1)
    return holds


# ---- attention -----------------------------------------------------------------------------------


_REFUSED = {
    "indices": "sparse attention by indices of keys",
    "block_indices": "sparse attention by indices of blocks",
    "sinks": "an argument sinks, whose meaning differs between models; s_aux has flash_attn's sinks",
    "head_mask": "a mask of heads",
    "block_table": "paged attention by block_table",
}


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | Tensor | None = None,
    max_length_k: int | Tensor | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """query [B, Hq, Sq, D], key [B, Hkv, Sk, D], value [B, Hkv, Sk, Dv]; returns [B, Sq, Hq, Dv].
    s_aux: sinks [Hq].

    As in "eager", sliding_window and is_causal apply only if there is no mask.
    """
    if (
        kwargs.get("deterministic")
        and query.is_cuda
        and query.requires_grad
        and not are_deterministic()
    ):
        raise _refuse(
            "deterministic_flash_attn is True, or deterministic for this layer",
            "call torch.use_deterministic_algorithms(True), which gpukern obeys",
        )
    if kwargs.get("output_attentions"):
        raise _refuse("output_attentions, which no kernel here keeps", _EAGER)
    for name, what in _REFUSED.items():
        if kwargs.get(name) is not None:
            raise _refuse(what, _EAGER)
    _check_head_dim(query, value)
    rules = {"scale": scaling, "softcap": softcap or 0.0, "dropout_p": dropout}
    if s_aux is not None:
        rules["sinks"] = s_aux if s_aux.dtype == query.dtype else s_aux.to(stats_dtype(query))
    position_bias = kwargs.get("position_bias")
    if position_bias is not None:
        rules["bias"] = _bias_of(position_bias, query, key)
    if _is_matrix(attention_mask):
        _add_matrix(rules, attention_mask, query, key)
        rule = Rule(causal=False)
    elif attention_mask is not None:
        rule = Rule.from_tensor(attention_mask)
    else:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if sliding_window is not None and not causal:
            raise _refuse(
                "a sliding window of bidirectional attention without a mask, which would say how "
                "wide it is",
                _SDPA,
            )
        rule = Rule(
            causal=bool(causal), window=None if sliding_window is None else sliding_window - 1
        )
    if cu_seq_lens_q is not None:
        if (
            cu_seq_lens_k is None
            or {"bias", "attn_mask"} & rules.keys()
            or rule.first is not None
            or rule.q_start is not None
            or query.shape[0] != 1
        ):
            raise _refuse(
                "cu_seq_lens_q with a mask or a bias, with a cache, with several rows or without "
                "cu_seq_lens_k",
                "pack all sequences into one row",
            )
        lengths = cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k
        return _packed(query, key, value, rule, lengths, rules), None
    if rule.cu_seqlens is not None:
        if "bias" in rules:
            raise _refuse("packed sequences with a position bias", _SDPA)
        return _packed(
            query, key, value, rule, (rule.cu_seqlens, rule.cu_seqlens, None, None), rules
        ), None
    _assert_holds(rule)
    window = -1 if rule.window is None else rule.window
    if rule.top_left or rule.q_start is not None or not (rule.causal or rule.window is not None):
        diagonal = 0
    else:
        diagonal = key.shape[2] - query.shape[2]
    out = flash_attn(
        query,
        key,
        value,
        is_causal=rule.causal,
        diagonal=diagonal,
        window_left=window,
        window_right=-1 if rule.causal else window,
        kv_start=rule.first,
        kv_end=rule.end,
        q_start=rule.q_start,
        **rules,
    )
    return out.transpose(1, 2), None


def _attention_of_parts(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs,
) -> tuple[Tensor, None]:
    """`_attention`, and latent attention: for a layer that hands on latents (transformers_latent.py)
    key and value are its c and k_pe."""
    latent = latent_layer_of(module)
    if latent is None:
        return _attention(module, query, key, value, attention_mask, **kwargs)
    c, k_pe = key, value
    rule = _rule_over_latents(module, attention_mask, kwargs)
    one = query.shape[2] == 1
    if (
        rule is not None
        and (rule.end is None or one)  # paged_attn counts several queries back from the last key
        and latent.takes(module, query, c, k_pe)
    ):
        _assert_holds(rule)
        lengths = _last_keys(rule, query, c)
        if rule.end is not None:
            lengths = torch.minimum(lengths, rule.end)
        scale = kwargs.get("scaling")
        return latent.attend(query, c, k_pe, scale, rule.first, lengths), None
    key, value = latent.products.expanded(module, c, k_pe)
    return _attention(module, query, key, value, attention_mask, **kwargs)


# Arguments beside the mask that change a layer's result.
_MORE = (
    *("dropout", "sliding_window", "softcap", "s_aux", "position_bias", "cu_seq_lens_q"),
    *("output_attentions", "deterministic", *_REFUSED),
)


def _rule_over_latents(
    module: torch.nn.Module, attention_mask: Tensor | None, kwargs: dict
) -> Rule | None:
    """The rule of a call that is causal and has no other argument of `_MORE`; None for any other
    call."""
    for name in _MORE:
        given = kwargs.get(name)
        if given is not None and (isinstance(given, Tensor) or given):
            return None
    if attention_mask is None:
        causal = kwargs.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        return Rule(causal=True) if causal else None
    if not is_rule(attention_mask):
        return None
    rule = Rule.from_tensor(attention_mask)
    return rule if rule.causal and rule.window is None and rule.cu_seqlens is None else None


def _last_keys(rule: Rule, query: Tensor, key: Tensor) -> Tensor:
    """[B] int32: the number of keys up to the position of each sequence's last query."""
    new = query.shape[2]
    if rule.q_start is not None:
        return rule.q_start + new
    return torch.full(
        (query.shape[0],),
        new if rule.top_left else key.shape[2],
        dtype=torch.int32,
        device=query.device,
    )


def _assert_holds(rule: Rule) -> None:
    if rule.holds is not None:
        torch._assert_async(
            (rule.holds == 1).all(),
            "gpukern attention: under torch.compile the mask must be causal or bidirectional, with "
            "or without a sliding window, and padding must be before or after the tokens; pass "
            "cu_seq_lens_q for packed sequences, or do not compile",
        )


_WIDE = 256


def _check_head_dim(query: Tensor, value: Tensor) -> None:
    """Refuses float32 and float64 with a large head_dim on CUDA: gpukern serves them by its plain
    kernel, and PyTorch's products are faster."""
    head_dim = max(query.shape[-1], value.shape[-1])
    if query.is_cuda and head_dim > _WIDE and query.element_size() > 2:
        dtype = str(query.dtype).removeprefix("torch.")
        raise _refuse(
            f"{dtype} with head_dim {head_dim} on CUDA, where gpukern is not tuned for more than "
            f"{_WIDE} in that dtype",
            "load the model in bfloat16 or float16, or " + _SDPA,
        )


def _is_matrix(mask: Any) -> bool:
    return isinstance(mask, Tensor) and (mask.dtype is torch.bool or mask.is_floating_point())


def _bias_of(bias: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """A bias [.., Sq, Sk or more] as flash_attn takes it."""
    bias = bias[..., : key.shape[2]]
    return bias if bias.dtype in (query.dtype, torch.float32) else bias.to(query.dtype)


def _add_matrix(rules: dict, mask: Tensor, query: Tensor, key: Tensor) -> None:
    """Adds a mask that is a matrix to flash_attn's arguments. The matrix includes causality and
    windows."""
    if mask.dtype is not torch.bool:
        bias = _bias_of(mask, query, key)
        rules["bias"] = rules["bias"] + bias if "bias" in rules else bias
        return
    given = mask
    if mask.dim() == 4 and mask.shape[1] == _NO_HEADS:
        mask = mask[:, :1]
    if torch.compiler.is_compiling():
        rules["attn_mask"] = mask[..., : key.shape[2]]
        return
    # All layers of a forward pass get the same tensor, so its AttnMask is kept on it.
    cached = getattr(given, "_gpukern_mask", None)
    cache_key = given._version, query.shape[2], key.shape[2]
    if cached is None or cached[0] != cache_key:
        dense = mask[(None,) * (4 - mask.dim())].expand(-1, -1, query.shape[2], -1)
        cached = given._gpukern_mask = cache_key, attn_mask_of(dense[..., : key.shape[2]])
    rules["attn_mask"] = cached[1]


def _packed(
    query: Tensor, key: Tensor, value: Tensor, rule: Rule, lengths: tuple, rules: dict
) -> Tensor:
    """Attention of packed sequences. They are stored one after the other in the batch's rows."""
    cu_q, cu_k, max_q, max_k = lengths
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    window = -1 if rule.window is None else rule.window
    out = flash_attn_varlen(
        q,
        k,
        v,
        cu_q.to(torch.int32),
        cu_k.to(torch.int32),
        query.shape[2] if max_q is None else int(max_q),
        key.shape[2] if max_k is None else int(max_k),
        is_causal=rule.causal,
        window_left=window,
        window_right=-1 if rule.causal else window,
        **rules,
    )
    return out.unflatten(0, (query.shape[0], query.shape[2]))


# ---- continuous batching -------------------------------------------------------------------------


def register_continuous_batching() -> None:
    """Replaces transformers' attention "paged|eager" by gpukern, for ``generate_batch`` and its
    continuous batching.

    ::

        torch_gpukern.integrations.transformers.register_continuous_batching()
        model.set_attn_implementation("paged|eager")
        model.generate_batch(inputs, generation_config)

    Continuous batching takes "sdpa", "paged|eager" and packages with "flash" in their names. Only
    "paged|eager" can be registered. From then on gpukern serves it for every model of the process,
    on every device: sequences are packed calls over the keys that transformers gathers from its
    pages, with windows, softcap and sinks. transformers still builds its mask. It is not read,
    because cu_seq_lens and the config say the same.

    Raises:
        ImportError: a transformers that does not take "paged|eager".
    """
    if "paged|eager" not in AttentionInterface().valid_keys():
        import transformers

        raise ImportError(
            f'torch_gpukern: transformers {transformers.__version__} has no "paged|eager": pip '
            f"install --upgrade transformers"
        )
    AttentionInterface.register("paged|eager", _paged_attention)


def _paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    cu_seq_lens_q: Tensor | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """query [1, Hq, T, D] of several sequences' new tokens, key and value [1, Hkv, S, D] of all
    their tokens."""
    if cu_seq_lens_q is None:
        raise _refuse(
            '"paged|eager" outside continuous batching', 'use attn_implementation="gpukern"'
        )
    # transformers makes the mask for this name from the config, so the window comes from there, too.
    # Not every family passes its window to a layer.
    kwargs |= {"is_causal": True, "sliding_window": _window_of(module)}
    return _attention(module, query, key, value, None, cu_seq_lens_q=cu_seq_lens_q, **kwargs)


def _window_of(module: torch.nn.Module) -> int | None:
    """The window of a layer in continuous batching, by the rules of transformers'
    `group_layers_by_attn_type` and `build_attention_mask`: a config without layer_types has its
    window in every layer, and a window of 1 is none.
    """
    config, layer = getattr(module, "config", None), getattr(module, "layer_idx", None)
    if config is None or layer is None:
        raise _refuse(
            f"{type(module).__name__} has no config and layer_idx that say its window", _SDPA
        )
    types, window = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
    if window is None or window <= 1 or (types is not None and types[layer] != "sliding_attention"):
        return None
    return window
