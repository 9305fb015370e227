"""Packing and unpacking of batches: the tree as a layout, tensors and arrays in blocks.

`pack` runs in the workers, `flattener` mostly there, `unpack`, `tensors` in the consumer, the others in both.
"""
