"""Samplers whose order is computed, and ranks' shares of any other sampler's order."""
