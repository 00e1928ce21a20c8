"""`small_config` without the reward that an untrained policy can earn."""

import dataclasses

from composer_jax.rewards import verify
from tests import small_config


def experiment():
  return dataclasses.replace(
      small_config.experiment(), rewards=(verify.Verify(),)
  )
