"""The command line, `python -m fastq_loader`: see `extras.tools.command`."""

import sys

from fastq_loader.extras.tools.command import run

if __name__ == "__main__":
    sys.exit(run())
