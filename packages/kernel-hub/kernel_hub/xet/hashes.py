"""The names of xorbs: hashes of their chunks, as the public clients compute them.

A chunk's hash is BLAKE3 with a key. The hashes of a xorb's chunks are the leaves of a tree, whose inner nodes are
BLAKE3, with another key, of a text with a line for each child: its hash and its size. The hashes themselves decide
where one node ends and the next begins. The root is the xorb's name.
"""

from __future__ import annotations

import struct

from blake3 import blake3

from kernel_hub.xet.format import Xorb, hash_text

_LEAF_KEY = bytes.fromhex("6697f5775b9550de3135cbaca597181c9de421109beb2b58b4d0b04b93adf229")
_NODE_KEY = bytes.fromhex("017ec5c7a5472996fd946666b48a02e65ddd536f37c76dd2f86352e64a53713f")
_MEAN_CHILDREN = 4
_MOST_CHILDREN = 9


def xorb_hash(xorb: Xorb) -> str:
    """Return the name that a xorb with these chunks has."""
    nodes = [(blake3(chunk, key=_LEAF_KEY).digest(), len(chunk)) for chunk in xorb.chunks()]
    while len(nodes) > 1:
        parents = []
        while nodes:
            count = _children(nodes)
            parents.append(_parent(nodes[:count]))
            del nodes[:count]
        nodes = parents
    return hash_text(nodes[0][0]) if nodes else "0" * 64


def _children(nodes: list[tuple[bytes, int]]) -> int:
    """Return how many of the first nodes have one parent: at least three, up to one whose hash ends a group."""
    most = min(_MOST_CHILDREN, len(nodes))
    for place in range(2, most):
        if struct.unpack("<4Q", nodes[place][0])[3] % _MEAN_CHILDREN == 0:
            return place + 1
    return most


def _parent(children: list[tuple[bytes, int]]) -> tuple[bytes, int]:
    text = "".join(f"{hash_text(digest)} : {size}\n" for digest, size in children)
    return blake3(text.encode(), key=_NODE_KEY).digest(), sum(size for _, size in children)
