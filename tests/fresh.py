"""Initial parameters without the wait for XLA."""

import functools
import math
from unittest import mock

import jax
import numpy as np

from composer_jax.model import params as params_lib

_real = jax.random.truncated_normal
_LEAST = 4096


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _draw(key, lower, upper, size):
  return _real(key, lower, upper, (size,), np.float32)


def _draws(key, lower, upper, shape, dtype):
  """The same bits: a draw depends on its number, not on how many there are."""
  size = math.prod(shape)
  most = max(_LEAST, 1 << (size - 1).bit_length())
  found = np.asarray(_draw(key, lower, upper, most), dtype)
  return found[:size].reshape(shape)


def params(cfg, seed=0):
  """`params.init` as numpy arrays.

  It compiles a program for every shape, seconds for each model of a test.
  """
  with mock.patch.object(jax.random, 'truncated_normal', _draws):
    made = params_lib.init(cfg, jax.random.key(seed))
  return jax.device_get(made)
