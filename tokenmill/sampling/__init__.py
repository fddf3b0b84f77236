"""Logits in, tokens out: greedy and random draws with top-k, top-p, min-p. Blind to requests and models."""

from tokenmill.sampling.columns import SamplingColumns, SamplingNeeds
from tokenmill.sampling.draw import mask_stops, sample

__all__ = ["SamplingColumns", "SamplingNeeds", "mask_stops", "sample"]
