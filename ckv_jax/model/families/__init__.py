"""The model families by their `model_type`: to add one, write its file and name it here."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ckv_jax.model.families.family import Family
from ckv_jax.model.families.llama import LLAMA
from ckv_jax.model.families.mistral import MISTRAL
from ckv_jax.model.families.qwen2 import QWEN2
from ckv_jax.model.families.qwen3 import QWEN3

__all__ = ["FAMILIES", "Family"]

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {family.model_type: family for family in (QWEN2, QWEN3, LLAMA, MISTRAL)}
)
