"""The store of a cluster's head, which all ranks of a job reach, as `ray.experimental.internal_kv` has it."""

from __future__ import annotations


class Store:
    """Attributes: keys: with their values."""

    def __init__(self) -> None:
        self.keys: dict[bytes, bytes] = {}

    def _internal_kv_get(self, key: str | bytes, namespace: str = "") -> bytes | None:
        return self.keys.get(key if isinstance(key, bytes) else key.encode())

    def _internal_kv_put(self, key: str, value: bytes, namespace: str = "") -> None:
        self.keys[key.encode()] = value

    def _internal_kv_del(self, key: str | bytes, namespace: str = "") -> None:
        self.keys.pop(key if isinstance(key, bytes) else key.encode(), None)

    def _internal_kv_list(self, prefix: str, namespace: str = "") -> list[bytes]:
        return [key for key in self.keys if key.startswith(prefix.encode())]
