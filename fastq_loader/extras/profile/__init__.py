"""`loader.profile()`: the lines of user code in which workers spend their time."""
