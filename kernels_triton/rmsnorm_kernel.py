"""Triton kernels of `rmsnorm`: one program per row, one writer per value."""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from kernels_triton import launch

CONFIGS = {
    (dtype, 90): launch.Config({}, warps=4, stages=1)
    for dtype in ('float32', 'bfloat16')
}
# A program sums the scale's gradient over ROWS rows, ascending; another sums
# the sums, BD columns at a time.
BACKWARD_CONFIGS = {
    (dtype, 90): launch.Config({'ROWS': 32}, warps=4, stages=1)
    for dtype in ('float32', 'bfloat16')
}
SUM_CONFIGS = {('float32', 90): launch.Config({'BD': 64}, warps=4, stages=1)}


@triton.jit
def rms_norm_forward(
    x, scale, y, inverse, D: tl.constexpr, EPS: tl.constexpr, BD: tl.constexpr
):
  row = tl.program_id(0).to(tl.int64)
  d = tl.arange(0, BD)
  values = tl.load(x + row * D + d, mask=d < D, other=0.0).to(tl.float32)
  factor = tl.load(scale + d, mask=d < D, other=0.0).to(tl.float32)
  inv = 1.0 / tl.sqrt(tl.sum(values * values, 0) / D + EPS)
  tl.store(y + row * D + d, values * inv * factor, mask=d < D)
  tl.store(inverse + row, inv)


@triton.jit
def rms_norm_backward(
    x,
    scale,
    inverse,
    dy,
    count,
    dx,
    partial,
    D: tl.constexpr,
    BD: tl.constexpr,
    ROWS: tl.constexpr,
):
  """dx of ROWS rows, and their part of the scale's gradient."""
  n = tl.load(count)
  chunk = tl.program_id(0).to(tl.int64)
  d = tl.arange(0, BD)
  factor = tl.load(scale + d, mask=d < D, other=0.0).to(tl.float32)
  total = tl.zeros((BD,), tl.float32)
  for i in range(ROWS):
    row = chunk * ROWS + i
    live = (d < D) & (row < n)
    values = tl.load(x + row * D + d, mask=live, other=0.0).to(tl.float32)
    g = tl.load(dy + row * D + d, mask=live, other=0.0)
    inv = tl.load(inverse + row, mask=row < n, other=0.0)
    unit = values * inv
    total += g * unit
    gs = g * factor
    out = (gs - unit * (tl.sum(gs * unit, 0) / D)) * inv
    tl.store(dx + row * D + d, out.to(dx.dtype.element_ty), mask=live)
  tl.store(partial + chunk * D + d, total, mask=d < D)


@triton.jit
def sum_rows(partial, count, out, D: tl.constexpr, BD: tl.constexpr):
  """Sums rows of f32 [n D], ascending."""
  n = tl.load(count)
  d = tl.program_id(0) * BD + tl.arange(0, BD)
  total = tl.zeros((BD,), tl.float32)
  at = partial + d
  for _ in range(n):
    total += tl.load(at, mask=d < D, other=0.0)
    at += D
  tl.store(out + d, total, mask=d < D)


def forward(x, scale, eps, implementation):
  """Returns (y f32 [n D], 1 / root mean square f32 [n])."""
  n, d = x.shape
  return launch.call(
      rms_norm_forward,
      x,
      scale,
      out=[
          jax.ShapeDtypeStruct((n, d), jnp.float32),
          jax.ShapeDtypeStruct((n,), jnp.float32),
      ],
      grid=(n,),
      config=launch.config(CONFIGS, x.dtype, implementation),
      implementation=implementation,
      D=d,
      EPS=eps,
      BD=triton.next_power_of_2(d),
  )


def backward(x, scale, inverse, dy, implementation):
  """Returns (dx, dscale), each in the type of its primal."""
  n, d = x.shape
  config = launch.config(BACKWARD_CONFIGS, x.dtype, implementation)
  chunks = triton.cdiv(n, config.tiles['ROWS'])
  dx, partial = launch.call(
      rms_norm_backward,
      x,
      scale,
      inverse,
      dy,
      launch.size(n),
      out=[
          jax.ShapeDtypeStruct((n, d), x.dtype),
          jax.ShapeDtypeStruct((chunks, d), jnp.float32),
      ],
      grid=(chunks,),
      config=config,
      implementation=implementation,
      D=d,
      BD=triton.next_power_of_2(d),
  )
  config = launch.config(SUM_CONFIGS, partial.dtype, implementation)
  (dscale,) = launch.call(
      sum_rows,
      partial,
      launch.size(chunks),
      out=[jax.ShapeDtypeStruct((d,), jnp.float32)],
      grid=(triton.cdiv(d, config.tiles['BD']),),
      config=config,
      implementation=implementation,
      D=d,
  )
  return dx, dscale.astype(scale.dtype)
