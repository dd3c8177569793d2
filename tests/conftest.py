"""Settings that every test runs under: CPU, no network, no silent dtype or rank promotion."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"

import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Many tests make the same small engine: what XLA has compiled for one serves the next.
_compiled = tempfile.mkdtemp(prefix="ckv-tests-")
atexit.register(shutil.rmtree, _compiled, ignore_errors=True)
jax.config.update("jax_compilation_cache_dir", _compiled)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
