"""How fast and how large `fastq_loader` is beside other loaders: run `python -m bench`.

The parts, in the order in which a run uses them:

    workloads/   what is loaded: a dataset, a batch size, sometimes a training step
    peers/       who loads it: one loader each, all behind the same three calls
    memory.py    summed PSS of a peer and its workers, each peer alone in a fresh process
    measure.py   batches per second, the peers taking turns in one process
    results.py   what was measured, and the medians, spreads and ratios drawn from it
    report.py    the table and the JSON file
"""
