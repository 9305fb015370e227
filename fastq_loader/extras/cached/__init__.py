"""A cache of decoded samples for all processes of a machine: keys, values as bytes, and their file.

Runs in the program and in every process that reads the dataset.
"""
