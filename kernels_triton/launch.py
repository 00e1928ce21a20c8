"""The one seam between an op and the code that computes it.

An op has up to three implementations behind one signature:
  triton: the Triton kernel, through jax-triton; what a GPU runs.
  reference: pure JAX in blocks of constant shape; what every other device runs.
  interpret: the very same Triton kernel under Triton's interpreter on the host,
    to test it without a GPU.
A kernel's tiles, warps and stages come from a table keyed by (dtype, compute
capability) and never from the batch, so the compiler emits one program for the
trainer and the decoder, and a row has the same bits in both.
"""

from collections.abc import Mapping, Sequence
import contextlib
import contextvars
import hashlib
import importlib
import importlib.util
import json
import pkgutil
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

TRITON, REFERENCE, INTERPRET = 'triton', 'reference', 'interpret'

# Off: whether a * b + c becomes one rounding or two must follow from a
# kernel's text, not from what the compiler finds next to it.
_FP_FUSION = False
_INTERPRETED_SM = 90  # whose tiles the interpreter runs
_PACKAGE = 'kernels_triton'

_ahead_of_time = contextvars.ContextVar('sm', default=None)


class Config(NamedTuple):
  """How one kernel is compiled: its constexpr tile sizes, warps, stages."""

  tiles: Mapping[str, int]
  warps: int
  stages: int


Table = Mapping[tuple[str, int], Config]  # by dtype and compute capability


def _installed(*names: str) -> bool:
  specs = [importlib.util.find_spec(name) for name in names]
  # A folder of that name on the path has no origin.
  return all(spec is not None and spec.origin for spec in specs)


def _interpreting() -> bool:
  return importlib.import_module('triton').knobs.runtime.interpret


def resolve(implementation: str | None) -> str:
  """Says which implementation runs.

  Args:
    implementation: 'triton', 'reference', 'interpret', or None for triton on a
      GPU and reference elsewhere.

  Raises:
    ValueError: it is unknown, or cannot run here.
  """
  on_gpu = jax.default_backend() == 'gpu'
  name = implementation or (TRITON if on_gpu else REFERENCE)
  if name not in (TRITON, REFERENCE, INTERPRET):
    raise ValueError(
        f'implementation={name!r}: must be {TRITON!r}, {REFERENCE!r},'
        f' {INTERPRET!r} or None'
    )
  if name == TRITON and not _installed('triton', 'jax_triton'):
    raise ValueError(
        f'implementation={name!r}: install triton and jax-triton with pip'
        " install 'composer_jax[gpu]'"
    )
  if name == TRITON and not on_gpu and _ahead_of_time.get() is None:
    raise ValueError(f'implementation={name!r}: no GPU here; use {REFERENCE!r}')
  if name == INTERPRET and not _installed('triton'):
    raise ValueError(
        f'implementation={name!r}: install triton with pip install'
        " 'composer_jax[kernels]'"
    )
  if name != REFERENCE and _interpreting() != (name == INTERPRET):
    raise ValueError(
        f'implementation={name!r}: triton reads TRITON_INTERPRET when it is'
        f' imported; start the process with {int(name == INTERPRET)}'
    )
  return name


@contextlib.contextmanager
def ahead_of_time(sm: int):
  """Lets 'triton' be traced and lowered without a GPU.

  Args:
    sm: compute capability to compile for, such as 90.
  """
  token = _ahead_of_time.set(sm)
  try:
    yield
  finally:
    _ahead_of_time.reset(token)


def _sm(implementation: str) -> int:
  if implementation == INTERPRET:
    return _INTERPRETED_SM
  chosen = _ahead_of_time.get()
  if chosen is not None:
    return chosen
  return int(jax.devices('gpu')[0].compute_capability.replace('.', ''))


def config(table: Table, dtype: Any, implementation: str) -> Config:
  """Looks up how a kernel is compiled.

  Args:
    table: of the kernel.
    dtype: of the operands.
    implementation: 'triton' or 'interpret'.

  Raises:
    ValueError: the table has no row for this GPU.
  """
  key = jnp.dtype(dtype).name, _sm(implementation)
  if key not in table:
    raise ValueError(
        f'no tile sizes for {key[0]} on sm_{key[1]}: have {sorted(table)}; use'
        f' {REFERENCE!r} or add a row'
    )
  return table[key]


def size(n: int) -> jax.Array:
  """A number of rows as a kernel operand, i32 [1].

  Only what both roles share may be known to the compiler. It specialises a
  plain integer argument that equals 1, which would give a batch of one row a
  program of its own.
  """
  return jnp.full((1,), n, jnp.int32)


def call(
    kernel: Any,
    *args: jax.Array,
    out: Sequence[jax.ShapeDtypeStruct],
    grid: tuple[int, ...],
    config: Config,
    implementation: str,
    **constants: Any,
) -> tuple[jax.Array, ...]:
  """Runs a Triton kernel.

  Args:
    kernel: decorated with `triton.jit`; takes pointers to `args`, then to
      `out`, then the tile sizes and `constants` as constexpr.
    *args: operands, any shapes; contiguous in row-major order.
    out: of the results. The kernel writes every element.
    grid: number of programs along up to three axes.
    config: from `config`.
    implementation: 'triton' or 'interpret'.
    **constants: what decode and training share: widths, flags.

  Returns:
    One array for each of `out`.
  """
  constants = dict(config.tiles) | constants
  out = tuple(out)
  if implementation == INTERPRET:
    from kernels_triton import interpreter  # needs triton

    return interpreter.call(kernel, args, out, grid, constants)
  import jax_triton  # needs triton

  return jax_triton.triton_call(
      *args,
      kernel=kernel,
      out_shape=out,
      grid=grid,
      num_warps=config.warps,
      num_stages=config.stages,
      compute_capability=_sm(implementation),
      enable_fp_fusion=_FP_FUSION,
      **constants,
  )


def tables() -> dict[str, Any]:
  """Config tables of every kernel by module; needs triton."""
  found = importlib.import_module(_PACKAGE).__path__
  names = sorted(m.name for m in pkgutil.iter_modules(found))
  out = {'fp_fusion': _FP_FUSION}
  for name in names:
    if name.endswith('_kernel'):
      module = importlib.import_module(f'{_PACKAGE}.{name}')
      out[name] = {
          table: {
              f'{dtype}/sm_{sm}': [dict(row.tiles), row.warps, row.stages]
              for (dtype, sm), row in getattr(module, table).items()
          }
          for table in dir(module)
          if table.endswith('CONFIGS')
      }
  return out


def facts(implementation: str | None) -> dict[str, str]:
  """What fixes the bits beside `contract.constants()`, for manifests.

  Returns:
    The implementation, and where kernels run a sha256 over their tables.
  """
  name = resolve(implementation)
  if name == REFERENCE:
    return {'kernels': name}
  text = json.dumps(tables(), sort_keys=True).encode()
  return {'kernels': name, 'tables': hashlib.sha256(text).hexdigest()}
