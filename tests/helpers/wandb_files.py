"""What W&B has written in offline mode: the records in a .wandb file, as `wandb sync` would send them.

The file is a log of LevelDB behind a header of 7 bytes: blocks of 32 KiB with pieces, each with a checksum, a length
and a kind (whole, first, middle, last). The pieces of a record are one message of W&B's own protocol.
"""

import struct
from pathlib import Path

HEADER, BLOCK = 7, 2**15
WHOLE, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def messages(data):
    position, parts = HEADER, []
    while position + HEADER <= len(data):
        left = BLOCK - position % BLOCK
        if left < HEADER:  # too little for a piece: the rest of the block is empty
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        parts = parts * (kind in (MIDDLE, LAST)) + [data[position + HEADER : position + HEADER + length]]
        position += HEADER + length
        if kind in (WHOLE, LAST):
            yield b"".join(parts)


def read(path):
    """The records of a .wandb file by their kinds: {"run": [...], "history": [...], ...}."""
    from wandb.proto.wandb_internal_pb2 import Record

    found = {}
    for message in messages(Path(path).read_bytes()):
        record = Record.FromString(message)
        kind = record.WhichOneof("record_type")
        found.setdefault(kind, []).append(getattr(record, kind))
    return found
