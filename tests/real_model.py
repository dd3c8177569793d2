"""The real model that tests and benchmarks share, from the user's cache or fetched into it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckv_jax.data.smollm2 import fetch
from ckv_jax.errors import CheckpointError


def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file; skips the test, with the reason, without one."""
    try:
        return fetch()
    except CheckpointError as error:
        pytest.skip(f"the real model is not here: {error}")


def smollm2_in_transformers(path: Path) -> Any:
    """transformers' float32 model of the same file."""
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    return AutoModelForCausalLM.from_pretrained(
        str(path.parent),
        gguf_file=path.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    ).eval()
