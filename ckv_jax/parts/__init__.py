"""Stored texts in any order: each prefix moved to its place, the most needed of it computed again.

A prefix's keys and values know nothing of what stands before it when it is put behind others. Keys
are rotated to their new places, which is exact; what texts should know of each other is computed
again for a share of the tokens (CacheBlend's frame, Yao et al., EuroSys 2025): the first of each
text (EPIC's choice) and those that the question attends to most (ProphetKV's).
"""
