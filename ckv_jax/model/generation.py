"""How a checkpoint says that text should be generated with it: `generation_config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckv_jax.errors import CheckpointError
from ckv_jax.model.config import read_generation_config
from ckv_jax.model.sampling import SamplingParams

__all__ = ["GenerationDefaults", "generation_defaults"]

_TOP_K = 50  # what HF takes where a config that samples names none
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "repetition_penalty": (1,),
    "encoder_repetition_penalty": (1,),
    "length_penalty": (1,),
    "diversity_penalty": (0,),
    "num_beams": (1,),
    "penalty_alpha": (0,),
    "no_repeat_ngram_size": (0,),
    "min_new_tokens": (0,),
    "min_p": (0,),
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "bad_words_ids": (),
    "suppress_tokens": (),
    "begin_suppress_tokens": (),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
}
"""Settings that change which tokens come and are not built here, and the values that do nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """What a checkpoint asks for; its end-of-text ids are in its `ModelConfig`."""

    sampling: SamplingParams
    ignored: Mapping[str, Any]
    """Settings that ask for something that is not built here, as the file has them."""


def generation_defaults(folder: Path) -> GenerationDefaults:
    """The settings of a folder's `generation_config.json`; greedy where there is none.

    As in HF, temperature, top-k (50 if not named) and top-p count only with `do_sample`. Raises
    `CheckpointError` for a file that is not JSON or holds values that mean nothing.
    """
    values = read_generation_config(folder)
    given: dict[str, Any] = {}
    if values.get("do_sample"):
        usual = {"temperature": 1.0, "top_p": 1.0, "top_k": _TOP_K}
        given = {name: _or(values.get(name), default) for name, default in usual.items()}
    if values.get("max_new_tokens") is not None:
        given["max_tokens"] = values["max_new_tokens"]
    try:
        sampling = SamplingParams(**given)
    except ValueError as error:
        raise CheckpointError(f"generation_config.json in {folder}: {error}") from error
    ignored = {
        name: values[name]
        for name, neutral in _NEUTRAL.items()
        if values.get(name) is not None and values[name] not in neutral
    }
    return GenerationDefaults(sampling=sampling, ignored=ignored)


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
