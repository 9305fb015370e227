"""How fast and how large `fastq_loader` is beside other loaders: `python -m bench`, and `bench/README.md`.

Its parts:

    arguments.py   the command line, with every default filled in
    run.py         a run: its cases are measured, shown and kept
    machine.py     where and when
    digest.py      of which files of the package results are, and the check of a release
    workloads/     what is loaded: a dataset, a batch size, sometimes a training step
    peers/         who loads it: one loader each, all behind the same three calls
    timing/        what is timed: a module for each kind makes cases, and `rounds` measures every case
    output/        what is written: rows, one for each block; figures, tables and the picture of them
    results/       rows of runs, with their tables and pictures
"""
