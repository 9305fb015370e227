"""A batch as bytes: its tree into a spec, its tensors and arrays into blocks, and back.

`pack` and `walker` run in the workers, `unpack` in the consumer; the others run on both sides.
"""
