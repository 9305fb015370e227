"""Transforms of a batch on its device: normalise images, fill the inputs of a captured step."""
