"""Alternatives to this engine, over the same checkpoint and questions."""

from __future__ import annotations

from bench.peers.base import Peer
from bench.peers.hugging_face import HuggingFace, Presses
from bench.peers.saved_slots import SavedSlots

INT8 = "llama.cpp-Q8_0"
"""The peer of this engine with int8 weights."""
PEERS: dict[str, Peer] = {
    "transformers": HuggingFace(),
    "llama.cpp": SavedSlots(),
    INT8: SavedSlots("Q8_0"),
    "kvpress": Presses(),
}
"""By the names that `python -m bench.peers --peers` takes."""
