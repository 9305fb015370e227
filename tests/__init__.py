"""Set before torch is imported: its threads sleep while they wait for each other. By default they spin, which
on a machine with other work to do can make a test take ten times as long."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
