"""`small_config` with so few tasks that they do not last for the run."""

import dataclasses

from composer_jax.environments import micro_repair
from tests import small_config

TASKS = 24


@dataclasses.dataclass(frozen=True)
class Few(micro_repair.MicroRepair):
  """The first tasks of a source and no more."""

  def task(self, index, split):
    if split == 'train' and index >= TASKS:
      raise IndexError(index)
    return super().task(index, split)


def experiment():
  return dataclasses.replace(small_config.experiment(), tasks=Few())
