"""What the training binaries do before and after their own work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import os

from absl import flags as absl_flags

from composer_jax import config
from experiments import flags
from experiments import job

# The flags below belong to the binary that asks for them: its --help has them.
absl_flags.disclaim_key_flags()


def define() -> None:
  """Defines the flags of a training binary."""
  flags.define_experiment()
  flags.define_workdir()
  flags.define_dry_run()
  flags.define_compilation_cache()
  absl_flags.DEFINE_bool(
      'accept_numeric_change',
      False,
      'Continues a run although what decides its bits has changed: a version, a'
      ' constant, the processor. The manifest records it.',
  )


def _plan(cfg: config.Experiment, rl: bool) -> str:
  """What a run will do; what its steps take, if it needs more than a machine."""
  from composer_jax.runs import footprint
  from composer_jax.runs import plan
  from composer_jax.runs import preflight
  from experiments import machine
  from kernels_triton import launch as kernels

  if cfg.mesh.devices <= machine.MAX_HOST_DEVICES:
    preflight.check(cfg, rl=rl, memory_bytes=machine.memory_bytes())
    kernels.resolve(cfg.model.kernels)
    return plan.text(cfg)
  machine.pretend(cfg.mesh.devices)
  return plan.text(cfg, footprint.of(cfg))


def main(
    work: Callable[..., bool],
    *,
    rl: bool = True,
    leaves: Sequence[str] = (),
    join: Callable[[], int] = lambda: 1,
) -> int:
  """Resolves the config, opens the work directory and runs `work`.

  Args:
    work: Called with a `pipeline.Run`; False if it stopped before its end.
    rl: Whether it plays tasks.
    leaves: Files of the work directory that it has made at its end.
    join: Joins the job of several processes that `work` runs in.

  Returns:
    Exit code: 0, also after a Ctrl-C that was handled.
  """
  cfg = flags.experiment()
  if absl_flags.FLAGS.dry_run:
    print(_plan(cfg, rl))
    return 0
  processes = join()
  with job.in_turn('workdir'):
    workdir = flags.workdir() if job.first() else None

  # Not before: --help and a mistyped flag need not wait for jax.
  from composer_jax.learner import step
  from composer_jax.runs import manifest
  from composer_jax.runs import pipeline
  from composer_jax.runs import preflight
  from experiments import machine
  from kernels_triton import contract
  from kernels_triton import launch as kernels

  if rl and workdir and pipeline.finished(cfg, workdir, leaves):
    print(
        f'{workdir}: this run is finished, {pipeline.steps_done(workdir)} RL'
        f' steps are done (rl.steps={cfg.rl.steps}); raise rl.steps to go on'
    )
    return 0
  devices = machine.setup_devices(
      cfg, absl_flags.FLAGS.compilation_cache, processes
  )
  preflight.check(cfg, rl=rl, memory_bytes=machine.memory_bytes())
  facts = manifest.build(
      cfg,
      devices=[*devices.train, devices.rollout],
      processes=processes,
      contract=contract.constants() | kernels.facts(cfg.model.kernels),
      xla_flags=os.environ.get('XLA_FLAGS', ''),
      command=flags.command(),
  )
  accept = absl_flags.FLAGS.accept_numeric_change
  with machine.Interrupt() as stop:
    with job.in_turn('run'):
      if workdir is None:
        workdir = flags.existing_workdir()
      else:
        for change in manifest.begin(workdir, cfg, facts, accept=accept):
          print(f'since this run was last started: {change}')
      run = pipeline.open_run(
          cfg,
          workdir,
          run_id=manifest.run_id(workdir),
          mesh=step.make_mesh(cfg.mesh),
          decoder=devices.rollout,
          stop=stop,
      )
    try:
      complete = work(run)
    finally:
      run.writer.close()
  if not complete:
    print(f'stopped; go on with: {flags.command()}')
  return 0
