"""The layer-by-layer systems that ckv is compared with."""
