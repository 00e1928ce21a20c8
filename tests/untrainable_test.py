"""A task whose prompt does not fit is skipped and counted; the run goes on."""

import dataclasses

from absl.testing import absltest
from tests import hostile_turns
from tests import small_config

from composer_jax import trace
from composer_jax.chat import compact_renderer
from composer_jax.environments import micro_repair
from composer_jax.fleet import ingest
from composer_jax.fleet import ledger as ledger_lib
from composer_jax.runs import preflight
from composer_jax.runs import rollouts as rollouts_lib

_LONG = '\n' * compact_renderer.MAX_LINES  # more than can be numbered


@dataclasses.dataclass(frozen=True)
class _Tasks(micro_repair.MicroRepair):
  """Eight tasks, some of which cannot be shown, or have the id of another."""

  misfits: tuple[int, ...] = (0, 3, 4, 5)
  twins: bool = False

  def task(self, index, split):
    if split == 'train' and index >= 8:
      raise IndexError(index)
    task = super().task(index, split)
    if self.twins:
      return dataclasses.replace(task, id='twin')
    if split != 'train' or index not in self.misfits:
      return task
    files = {path: text + _LONG for path, text in task.files.items()}
    return dataclasses.replace(task, files=files)


def _run(tasks):
  cfg = small_config.experiment()
  rl = dataclasses.replace(cfg.rl, candidates_per_prompt=1, lease_seconds=600.0)
  texts = [tasks.task(k, 'warmup').files['f.py'] for k in range(300)]
  tokenizer = compact_renderer.train_tokenizer(texts, cfg.model.vocab)
  renderer = compact_renderer.CompactRenderer(tokenizer)
  return dataclasses.replace(cfg, tasks=tasks, rl=rl), renderer


class UntrainableTest(absltest.TestCase):

  def test_every_prompt_is_booked_and_the_run_ends_regularly(self):
    cfg, renderer = _run(_Tasks())
    version = trace.WeightVersion(0, 'd', None)
    ledger, outcomes, untrainable = ledger_lib.Ledger(), {}, 0
    with hostile_turns.Host(cfg, 'none:', renderer, device=None) as host:
      rollouts = rollouts_lib.Rollouts(cfg, host, ledger, version, 'run')
      while (step := rollouts.take()) is not None:
        batch = step.consumed
        for g in batch.groups + batch.untrained:
          outcomes[g.prompt] = {m.outcome for m in g.members.values()}
        untrainable += ingest.metrics(batch)['rollouts/untrainable']
        ledger = ledger_lib.commit(ledger, batch, 'd')
        version = trace.WeightVersion(batch.version + 1, 'd', None)
        host.call(rollouts.dispatcher.open(version))
        host._policy.version = version.step
      counted = rollouts._curriculum._tallies[-1][1]
      rollouts.close()
    want = {
        k: {'untrainable' if k in cfg.tasks.misfits else 'valid'}
        for k in range(8)
    }
    self.assertEqual(outcomes, want)
    self.assertEqual(untrainable, 4 * cfg.rl.rollouts_per_group)
    self.assertEqual(ledger_lib.lost(ledger), ())
    self.assertEqual(ledger_lib.from_json(ledger_lib.to_json(ledger)), ledger)
    self.assertLen(ledger_lib.played(ledger), 4)
    # Only what was played says anything of its kind.
    self.assertLess(counted[''][1], 4.01)

  def test_tasks_are_looked_at_before_the_run(self):
    said = preflight.prompts(*_run(_Tasks()))
    self.assertRegex(said, '^4 of 8 training tasks are untrainable.* lines')
    self.assertEqual(preflight.prompts(*_run(_Tasks(misfits=()))), '')
    self.assertEqual(preflight.prompts(*_run(micro_repair.MicroRepair())), '')
    with self.assertRaisesRegex(ValueError, 'tasks: no prompt fits'):
      preflight.prompts(*_run(_Tasks(misfits=tuple(range(8)))))
    with self.assertRaisesRegex(ValueError, "two have the id 'twin'"):
      preflight.prompts(*_run(_Tasks(twins=True)))


if __name__ == '__main__':
  absltest.main()
