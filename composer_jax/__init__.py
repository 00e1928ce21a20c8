"""Coding agents in pure JAX: mid-training, then RL inside the real harness.

  import composer_jax as cj

What an experiment is written with is here, under one name each; `__init__.pyi`
lists them by subject. A name is imported when it is first used, so importing
this package imports nothing heavy, and what runs without jax (tasks, rewards,
tools, environments) does so from here, too.

  @dataclasses.dataclass(frozen=True)
  class Reinforce:
    def __call__(self, s: cj.TokenStats):
      return -s.advantages * s.logps, {'reinforce/logp': cj.Mean.of(s.logps, s.mask)}
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
