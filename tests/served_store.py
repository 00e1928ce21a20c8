"""A weight store as a run leaves it, with random weights."""

import ml_dtypes
import numpy as np
from tests import serving_kit as lib

from composer_jax.model import params as params_lib
from composer_jax.runs import stored_model
from composer_jax.weights import publish


def named(seed):
  """Weights as they are published."""
  named = params_lib.names(lib.params(seed))
  return {k: np.asarray(v, ml_dtypes.bfloat16) for k, v in named.items()}


class Store:
  """A store with one version and its model."""

  def __init__(self, folder):
    self.url = f'file://{folder}/weights/'
    self.publisher = publish.Publisher(self.url, lib.EXPERIMENT.weights, 'a')
    self.publisher.publish(0, named(0))
    self.model = stored_model.trained_here(
        lib.EXPERIMENT, lib.tokenizer().to_str()
    )
    stored_model.write(self.url, self.model)
