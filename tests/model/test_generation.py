"""`generation_config.json`: what is obeyed, and what is told not to be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ckv_jax.errors import CheckpointError
from ckv_jax.model.sampling import SamplingParams, generation_defaults


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (None, {}),
        ({"eos_token_id": 3}, {}),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {}),
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.9},
            {"temperature": 0.6, "top_p": 0.9, "top_k": 50},
        ),
        ({"do_sample": True, "top_k": 20}, {"temperature": 1.0, "top_k": 20}),
        ({"max_new_tokens": 7, "repetition_penalty": 1.0}, {"max_tokens": 7}),
    ],
)
def test_sampling_is_what_the_file_says(
    values: dict[str, Any] | None, expected: dict[str, Any], tmp_path: Path
) -> None:
    if values is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(values))
    found = generation_defaults(tmp_path)
    assert found.sampling == SamplingParams(**expected)
    assert found.ignored == {}


def test_what_is_not_built_is_told(tmp_path: Path) -> None:
    values = {"repetition_penalty": 1.05, "num_beams": 1, "min_p": 0.1, "suppress_tokens": [4]}
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    del values["num_beams"]
    assert generation_defaults(tmp_path).ignored == values


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not JSON"),
        ('{"do_sample": true, "temperature": "hot"}', "generation_config.json.*temperature"),
        ('{"do_sample": true, "top_p": 2}', "top_p"),
        ('{"max_new_tokens": 0}', "max_tokens"),
    ],
)
def test_wrong_settings_are_named(text: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=reason):
        generation_defaults(tmp_path)
