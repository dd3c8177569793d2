"""Write goldens.npz: what torch and transformers say about every parity case.

    python -m tests.model.make_goldens

Run it where torch is installed (2.13 and transformers 5.23 made the committed file). Weights and
prompts come from seeds (`parity_cases.py`), so only answers are stored.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from ckv_jax.model.weights import save_pretrained
from tests.model.parity_cases import (
    CASES,
    GREEDY_PROMPT,
    GREEDY_TOKENS,
    ParityCase,
    parity_model,
    prompt,
)

GOLDENS = Path(__file__).with_name("goldens.npz")


def reference(case: ParityCase, folder: Path) -> dict[str, np.ndarray]:
    """Logits `[2, TOKENS, V]` float32 and, in float32, the greedy tokens, by transformers."""
    import torch
    from transformers import Qwen2ForCausalLM

    model = Qwen2ForCausalLM.from_pretrained(
        str(folder), dtype=getattr(torch, case.dtype), attn_implementation="eager"
    ).eval()
    tokens = torch.from_numpy(prompt(case)).long()
    with torch.no_grad():
        answers = {"logits": model(tokens).logits.float().numpy()}
        if case.dtype == "float32":
            start = tokens[:1, :GREEDY_PROMPT]
            out = model.generate(
                start,
                attention_mask=torch.ones_like(start),
                max_new_tokens=GREEDY_TOKENS,
                min_new_tokens=GREEDY_TOKENS,
                do_sample=False,
                pad_token_id=0,
            )
            answers["greedy"] = out[0, GREEDY_PROMPT:].numpy().astype(np.int32)
    return answers


def main() -> None:
    goldens = {}
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            save_pretrained(parity_model(case), folder)
            answers = reference(case, Path(folder))
        goldens[f"{name}.logits"] = answers["logits"][:, ::4]
        if "greedy" in answers:
            goldens[f"{name}.greedy"] = answers["greedy"]
    np.savez_compressed(GOLDENS, **goldens)


if __name__ == "__main__":
    main()
