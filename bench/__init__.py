"""How fast and how large `fastq_loader` is beside other loaders: run `python -m bench`.

The parts, in the order in which a run uses them:

    arguments.py   the command line, with every default filled in
    jobs.py        the parts of a run: which workload, how many workers, into which results
    workloads/     what is loaded: a dataset, a batch size, sometimes a training step
    peers/         who loads it: one loader each, all behind the same three calls
    ceiling.py     what as many processes could deliver if delivering cost nothing
    lanes.py       one peer's running loader, the loop that consumes it, the clocks over both
    measure.py     the steady state: peers and ceiling taking turns in one process
    turns.py       first batch, first epoch, epoch turns, break and restart
    start.py       time to the first batch by start method, in fresh processes
    cases.py       the cases of the schedule: slow samples, a slow consumer, batches that cost nothing
    costs.py       samples that cost what a list says, and how soon they could all be there
    schedule.py    whole epochs of a case, by loaders that differ in who loads what
    kills.py       what the death of a worker costs
    memory.py      peak memory and descriptors, each peer alone in a fresh process
    results.py     what was measured, and the medians, spreads, ratios and shares drawn from it
    goals.py       what was wanted of a case, and whether it came about
    files.py       results as JSON, and back
    report.py      the tables on the console
    plots.py       the pictures
    timeline.py    the one of who loads what when
    readme.py      the README's table, from a file

and what these share: batches.py (what is in a batch), fetch.py (a worker's share of the batches), child.py
(fresh processes), proc.py (/proc), machine.py (where and when), words.py (figures as text),
drawing.py (what all pictures have in common).

`python -m bench gpu` is a run of its own: gpu.py (the command), gpu_arms.py (shapes, and who brings them to
the device), gpu_measure.py (events, steps, the link's peak), gpu_results.py (figures, goals), gpu_report.py
(the tables), gpu_plots.py (the pictures).
"""
