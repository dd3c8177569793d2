"""ckv_jax: re-prefill over prefixes whose KV cache lives on SSD."""
