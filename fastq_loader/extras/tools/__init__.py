"""Tools for whole loaders: `compare`, `tune` and `doctor`. Child processes iterate copies of a loader."""
