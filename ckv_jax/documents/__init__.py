"""Requests over several stored documents in any order, with a share of their tokens recomputed.

A document's KV was computed without the documents before it. Its keys are rotated to their new
positions, which is exact. The attention between documents is recomputed for a share of the tokens
(CacheBlend's scheme, Yao et al., EuroSys 2025): the first of each document (as in EPIC) and those
that the question attends to most (as in ProphetKV).
"""
