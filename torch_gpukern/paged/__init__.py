"""The bookkeeping behind `torch_gpukern.PagedKVCache`, which is all that callers see of it."""
