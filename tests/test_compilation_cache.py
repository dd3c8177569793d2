"""What one process has compiled, the next one reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from ckv_jax.user_cache import enable_compilation_cache

PROGRAM = """
import json
import jax, jax.numpy as jnp
from ckv_jax.user_cache import enable_compilation_cache

events = []
jax.monitoring.register_event_listener(lambda name, **_: events.append(name))
jax.jit(lambda x: x * 3)(jnp.ones(7)).block_until_ready()  # before there is a cache
enable_compilation_cache()
enable_compilation_cache()  # a second call changes nothing
events.clear()
from ckv_jax.model.sampling import SamplingParams, sample, stack_params
params = stack_params([SamplingParams(temperature=0.5, top_k=2)])
sample(jnp.ones((1, 8)), params, jnp.zeros(1, int)).block_until_ready()
jax.jit(lambda x: jnp.tanh(x @ x).sum())(jnp.ones((16, 16))).block_until_ready()
print(json.dumps({
    "folder": jax.config.jax_compilation_cache_dir,
    "asked": events.count("/jax/compilation_cache/compile_requests_use_cache"),
    "read": events.count("/jax/compilation_cache/cache_hits"),
}))
"""


def run(cache: Path) -> dict:
    """One process that enables the cache and compiles; what it asked the cache for, and found."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "CKV_", "XDG_"))}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False,
        env=inherited | {"JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(cache)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_second_process_compiles_next_to_nothing(tmp_path: Path) -> None:
    """The cache starts even after something was compiled."""
    first, second = run(tmp_path), run(tmp_path)
    folder = tmp_path / "ckv_jax" / "compiled"
    assert first["folder"] == second["folder"] == str(folder)
    assert folder.stat().st_mode & 0o077 == 0
    assert second["asked"] == first["asked"] >= 5
    assert second["read"] == second["asked"] > first["read"]


@pytest.mark.parametrize(
    ("environment", "has", "folder"),
    [
        ({"CKV_COMPILATION_CACHE": "off"}, None, None),
        ({"XDG_CACHE_HOME": "", "HOME": "{home}"}, None, "{home}/.cache/ckv_jax/compiled"),
        ({"XDG_CACHE_HOME": "{home}"}, "", "{home}/ckv_jax/compiled"),
        ({"XDG_CACHE_HOME": "{home}"}, "/their/folder", "/their/folder"),
        ({"XDG_CACHE_HOME": "/proc/no-such-place"}, None, None),
    ],
)
def test_what_jax_and_the_environment_say_is_respected(
    environment: dict[str, str], has: str | None, folder: str | None, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """`has`: the folder that JAX has already, as by JAX_COMPILATION_CACHE_DIR."""
    monkeypatch.delenv("CKV_COMPILATION_CACHE", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value.format(home=tmp_path))
    names = (
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )
    before = {name: jax.config.values[name] for name in names}
    jax.config.update("jax_compilation_cache_dir", has)
    try:
        enable_compilation_cache()
        found = jax.config.values["jax_compilation_cache_dir"]
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
    assert found == (folder and folder.format(home=tmp_path))
