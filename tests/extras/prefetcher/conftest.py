"""The late device of the tests of `device`."""

from tests.device.conftest import late as late
