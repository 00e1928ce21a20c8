"""Runs a Triton kernel on numpy arrays, under Triton's interpreter.

The interpreter expects torch tensors, of which it only uses the address and
the type. It also computes on raw bits of bf16 without saying so: in tl.dot, in
arithmetic before an upcast, and where f32 becomes bf16 (it truncates, a GPU
rounds to nearest even). `_patch` cures the first and the last and refuses the
second. Import it only in a process started with TRITON_INTERPRET=1.
"""

from collections.abc import Mapping, Sequence
import functools
import inspect
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_BF16 = jnp.dtype(jnp.bfloat16)
_NAMES = {
    np.dtype(np.float32): 'fp32',
    _BF16: 'bf16',
    np.dtype(np.bool_): 'i1',
} | {
    np.dtype(f'{kind}{bits}'): f'{kind[0]}{bits}'
    for kind in ('int', 'uint')
    for bits in (8, 16, 32, 64)
}
# The interpreter keeps the running program's place in a global.
_lock = threading.Lock()


class _Memory:
  """A numpy array that looks enough like a torch tensor, and like its storage.

  Kernels read and write the array itself: nothing is copied in or out.
  """

  def __init__(self, array: np.ndarray):
    if not array.flags.c_contiguous:
      raise ValueError('kernel operand: must be contiguous')
    self._array = array
    self.dtype = _NAMES[array.dtype]

  def data_ptr(self):
    return self._array.ctypes.data

  def untyped_storage(self):
    return self

  def cpu(self):
    return self

  def new_empty(self, *_, **__):
    return _Memory(self._array)

  def set_(self, *_):
    pass

  def copy_(self, _):
    pass

  def storage_offset(self):
    return 0

  def size(self):
    return self._array.shape

  def stride(self):
    return tuple(s // self._array.itemsize for s in self._array.strides)


def _widened(handle):
  """bf16 as the f32 of the same value."""
  if handle.dtype.scalar != tl.bfloat16:
    return handle
  bits = handle.data.astype(np.uint32) << 16
  return interpreter.TensorHandle(bits.view(np.float32), tl.float32)


def _refuse_bf16(method):
  @functools.wraps(method)
  def checked(self, first, *rest):
    values = first if isinstance(first, tuple) else (first,)
    if any(v.dtype.scalar == tl.bfloat16 for v in values):
      raise TypeError('arithmetic on bf16: upcast with .to(tl.float32) first')
    return method(self, first, *rest)

  return checked


@functools.cache
def _builtins(package):
  return [n for n, f in inspect.getmembers(package) if tl.core.is_builtin(f)]


def _patch_builtin(package, builder, scope):
  """As Triton's, which lists the whole package at each call of a function."""
  for name in _builtins(package):
    member = getattr(package, name)
    if tl.core.is_builtin(member):
      interpreter._patch_attr(package, name, member, builder, scope)


@functools.cache
def _patch():
  """Makes bf16 mean what it means on a GPU; once per process."""
  builder = type(interpreter.interpreter_builder)
  dot, cast, binary = builder.create_dot, builder.cast_impl, builder.binary_op
  convert = interpreter._convert_float

  def create_dot(self, a, b, *rest):
    return dot(self, _widened(a), _widened(b), *rest)

  def binary_op(self, *operands):
    out = binary(self, *operands)
    if out.data.dtype == np.bool_:  # Else a broadcast makes it an integer.
      out.dtype = tl.int1
    return out

  def cast_impl(self, src, dst):
    source, target = src.dtype.scalar, dst.scalar
    if tl.bfloat16 in (source, target) and source != target:
      if tl.float32 not in (source, target):
        raise TypeError(f'{source} to {target}: go through tl.float32')
    return cast(self, src, dst)

  def convert_float(x, source, target, rounding):
    if source == tl.float32 and target == tl.bfloat16:
      return x.astype(_BF16).view(np.uint16)
    if source == tl.bfloat16 and target == tl.float32:
      return np.asarray(x).astype(np.uint32) << 16
    return convert(x, source, target, rounding)

  builder.create_dot, builder.cast_impl = create_dot, cast_impl
  interpreter._convert_float = convert_float
  builder.binary_op = _refuse_bf16(binary_op)
  builder.unary_op = _refuse_bf16(builder.unary_op)
  interpreter._patch_builtin = _patch_builtin
  reduce = interpreter.ReduceScanOpInterface
  reduce.check_tensor = _refuse_bf16(reduce.check_tensor)


def call(
    kernel: Any,
    args: Sequence[jax.Array],
    out: Sequence[jax.ShapeDtypeStruct],
    grid: tuple[int, ...],
    constants: Mapping[str, Any],
) -> tuple[jax.Array, ...]:
  """Runs the kernel's programs one after the other, behind a callback.

  Args:
    kernel: decorated with `triton.jit`.
    args: operands.
    out: of the results.
    grid: number of programs along up to three axes.
    constants: constexpr arguments.

  Returns:
    One array for each of `out`.
  """
  _patch()

  def run(*args):
    args = [np.ascontiguousarray(a) for a in args]
    # What a kernel forgets to write must not pass for a zero.
    out_arrays = [
        np.frombuffer(b'\xff' * (s.size * s.dtype.itemsize), s.dtype)
        .reshape(s.shape)
        .copy()
        for s in out
    ]
    memory = [_Memory(a) for a in (*args, *out_arrays)]
    with _lock, np.errstate(all='ignore'):
      kernel[grid](*memory, **constants)
    return tuple(out_arrays)

  return jax.pure_callback(run, tuple(out), *args, vmap_method='sequential')
