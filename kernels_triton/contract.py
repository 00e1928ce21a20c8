"""Constants of the numeric contract, shared by the trainer and the decoder.

Every operation that reduces, or that calls exp or log, sees blocks of one
constant shape in both roles, so the compiler emits one program for them
whatever the batch, and a token's log-prob has the same bits everywhere.
Changing a constant changes bits: the digest is written into every run manifest
and weight manifest.
"""

import hashlib
import json

ROWS = 16  # rows per block of projections, norms, router, head
QUERY_ROWS = 4  # query tokens per attention tile
KEY_BLOCK = 32  # keys per attention block; segments start at multiples of it
EXPERT_ROWS = 16  # rows per expert tile

_CONSTANTS = {
    'rows': ROWS,
    'query_rows': QUERY_ROWS,
    'key_block': KEY_BLOCK,
    'expert_rows': EXPERT_ROWS,
}


def constants() -> dict[str, int]:
  """The constants by name, for manifests."""
  return dict(_CONSTANTS)


def digest() -> str:
  """sha256 over the constants."""
  text = json.dumps(_CONSTANTS, sort_keys=True).encode()
  return hashlib.sha256(text).hexdigest()
