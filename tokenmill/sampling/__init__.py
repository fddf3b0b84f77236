"""Logits in, tokens out: penalties, biases, masks, draws with top-k, top-p, min-p, and log-probabilities.

Blind to requests and models.
"""

from tokenmill.sampling.adjustments import Adjustments
from tokenmill.sampling.columns import SamplingColumns, SamplingNeeds
from tokenmill.sampling.draw import mask_stops, sample

__all__ = ["Adjustments", "SamplingColumns", "SamplingNeeds", "mask_stops", "sample"]
