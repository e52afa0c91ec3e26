"""gpukern inside other libraries. Each module is imported by name and needs its library alone:

- `transformers`: ``attn_implementation="gpukern"``
- `flash_attn`: the functions of the flash-attn package
- `sdpa`: ``F.scaled_dot_product_attention``
- `distributed`: sharding rules for DTensor, which the ops register by themselves
- `vllm`: the attention backend GPUKERN, which vLLM finds by itself
"""
