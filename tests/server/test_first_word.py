"""A SentencePiece model's completion goes on from its prompt, the space between them included."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest
from serving import MODEL, in_thread

from ckv_jax import Engine, EngineConfig
from ckv_jax.server.app import make_app
from tests.model.spm_checkpoint import SENTENCE, write_spm_checkpoint

PROMPT, REST = "The capital of France is", " the quick brown fox"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> openai.OpenAI:
    raise NotImplementedError
