"""The example of docs/add_a_codec.md runs: half of the bytes, and an answer near the exact one."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine_support import scale_error, tokens
from engine_tiny import tiny_engine

from ckv_jax import Request

PAGE = Path(__file__).resolve().parent.parent / "docs" / "add_a_codec.md"


def test_the_page_s_codec_runs(tmp_path: Path) -> None:
    codec, config = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.M | re.S)
    names: dict[str, Any] = {}
    for code in (codec, config):
        exec(compile(code, str(PAGE), "exec"), names)
    with tiny_engine(tmp_path, dtype="bfloat16") as plain:
        system = replace(plain.system, codec=names["config"].system.codec)
        with plain.variant(replace(plain.config, system=system)) as engine:
            prefix = engine.ingest(tokens(200))
            request = Request(prefix=prefix, suffix=[1, 2, 3], budget=1.0)
            (result,) = engine.reprefill([request])
            assert engine.layout.stored_bytes * 2 == engine.layout.pack_bytes
            assert result.codec == "float8:1"
            assert scale_error(result.logits, engine.recompute(request).logits) < 0.05
