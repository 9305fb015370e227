"""Packing and unpacking of batches: the tree as a layout, tensors and arrays in blocks.

`pack` runs in the workers, `walker` mostly there, `unpack` and `tensors` in the consumer, the others in both.
"""
