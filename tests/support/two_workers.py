"""Load two batches with two workers, on whatever system this is: the trial of an installed package."""

from __future__ import annotations

import fastq_loader
from fastq_loader.memory import nontemporal

if __name__ == "__main__":
    batches = [batch.tolist() for batch in fastq_loader.DataLoader(range(8), 4, num_workers=2)]
    assert batches == [[0, 1, 2, 3], [4, 5, 6, 7]], batches
    print(fastq_loader.__path__[0], nontemporal.AVAILABLE)
