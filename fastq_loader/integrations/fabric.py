"""For Lightning's Fabric: see `extras.frameworks.fabric`."""

from fastq_loader.extras.frameworks import fabric as fabric
