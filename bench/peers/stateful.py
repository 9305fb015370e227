"""torchdata's StatefulDataLoader: torch's loader and its arguments, with a state that can be saved."""

from __future__ import annotations

import warnings

from torchdata.stateful_dataloader import StatefulDataLoader

from bench.peers.torch_loader import TorchLoader

# torchdata 0.11 calls what torch 2.13 has deprecated.
warnings.filterwarnings("ignore", "'set_vital' is deprecated", UserWarning)


class Stateful(TorchLoader):
    loader_class = StatefulDataLoader
