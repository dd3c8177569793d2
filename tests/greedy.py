"""What transformers generates, from texts without near ties."""

from __future__ import annotations

from typing import Any

import torch

GAP = 1e-3
"""Between the two largest logits of every token, at least, as a share of the largest of all: some
hundred times what rounding moves them by."""


def greedy_tokens(model: Any, prompt: list[int], count: int) -> list[int]:
    """`count` tokens by transformers' `model` after a prompt, none of them by a near tie."""
    ids = torch.tensor([prompt])
    found = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count,
        eos_token_id=None, pad_token_id=0, output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    logits = torch.stack(found.logits)[:, 0]  # [count, V]
    best = logits.topk(2).values
    assert (best[:, 0] - best[:, 1]).min() > GAP * logits.abs().max()
    return found.sequences[0, len(prompt) :].tolist()
