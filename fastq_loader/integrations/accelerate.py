"""For Accelerate and transformers' Trainer: see `extras.frameworks.accelerate`."""

from fastq_loader.extras.frameworks.accelerate import prepare as prepare
