"""torchdata's StatefulDataLoader: torch's loader and its arguments, with a state that can be saved."""

from __future__ import annotations

import warnings
from typing import Any

from torchdata.stateful_dataloader import StatefulDataLoader

from bench.peers import LoaderSettings
from bench.peers.torch_loader import TorchLoader, loader_arguments
from bench.workloads import Load

# torchdata 0.11 calls what torch 2.13 has deprecated.
warnings.filterwarnings("ignore", "'set_vital' is deprecated", UserWarning)


class Stateful(TorchLoader):
    distributions = ("torchdata",)

    def _make(self, load: Load, settings: LoaderSettings) -> Any:
        return StatefulDataLoader(**loader_arguments(load, settings))
