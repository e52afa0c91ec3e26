"""The bookkeeping behind `torch_gpukern.PagedKVCache`: pool <- sequences <- growth, prefixes. Callers see the class alone."""
