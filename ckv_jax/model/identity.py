"""Who a model is, as the store knows it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from ckv_jax.model.checkpoint import weight_files
from ckv_jax.model.config import ModelConfig
from ckv_jax.model.decoder import Transformer
from ckv_jax.model.placing import check_whole_model
from ckv_jax.model.tokenizer import tokenizer_files
from ckv_jax.storage.fingerprint import Fingerprint, hash_files
from ckv_jax.user_cache import cache_folder

KV_ARITHMETIC = 1
"""Version of what this package does between tokens and KV, beside what the checkpoint says.

Raised with any change that makes KV of one version and of the next unfit to stand in one prefix.
The first one goes without saying, so that what it stored stays readable.
"""


def model_fingerprint(
    folder: Path, config: ModelConfig, *, dtype: str, weights: str | None = None
) -> Fingerprint:
    """Of a checkpoint folder: the content of its weights and tokenizer, and what they become."""
    cache = cache_folder() / "fingerprints.json"
    return _fingerprint(
        config,
        dtype=dtype if weights is None else f"{dtype}, weights {weights}",
        weights=hash_files(weight_files(folder), cache),
        tokenizer=hash_files(tokenizer_files(folder)),
    )


def random_fingerprint(model: Transformer) -> Fingerprint:
    """Of a model that is in no folder: the content of its arrays. Of one that is split, take it
    before it is: the order of its arrays is another."""
    check_whole_model(model)
    content = hashlib.sha256()
    for leaf in jax.tree.leaves(nnx.to_pure_dict(nnx.state(model))):
        content.update(np.asarray(leaf).tobytes())
    return _fingerprint(
        model.config, dtype=model.dtype.name, weights=content.hexdigest(), tokenizer=""
    )


def _fingerprint(config: ModelConfig, *, dtype: str, weights: str, tokenizer: str) -> Fingerprint:
    values = asdict(config)
    for name in ("eos_token_ids", "max_position_embeddings"):
        del values[name]  # these say when a text ends, not what its keys and values are
    for name in ("attention_bias", "mlp_bias"):
        if not values[name]:
            del values[name]  # it went without saying when there was nothing to say
    rope = {key: values.pop(key) for key in ("rope_theta", "rope_scaling")}
    return Fingerprint(
        {
            "weights": weights,
            "config": json.dumps(values, sort_keys=True),
            "tokenizer": tokenizer,
            "rope": json.dumps(rope, sort_keys=True),
            "dtype": dtype,
            **({"arithmetic": str(KV_ARITHMETIC)} if KV_ARITHMETIC > 1 else {}),
        }
    )
