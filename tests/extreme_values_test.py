"""A dry run refuses what a run cannot do, in one line, before it begins."""

import pathlib
import random
import tempfile
import typing

from absl.testing import absltest
from absl.testing import parameterized
from composer_jax import checks
import composer_jax as cj
from composer_jax.runs import plan
from composer_jax.runs import preflight
from tests import extreme_values
from tests import small_run

# What no shipped config holds, but a user's may.
_OTHERS = (
    *(cj.Composer2, cj.GrpoClip, cj.Cispo, cj.Gspo, cj.IcePop, cj.M2po),
    *(cj.Ipo, cj.GroupStandard, cj.LengthPenalty, cj.Judge, cj.Yarn),
    *(cj.Llama3, cj.HarborDirectory),
)
_SAMPLED = 40


def _edited(module, path, value):
  """The config with one value set; None if it was refused in one line."""
  try:
    return cj.override(extreme_values.here(module), f'{path}={value}')
  except ValueError as e:
    assert f'{path}={value}' in str(e) and '\n' not in str(e), e
    return None


class DeclaredTest(parameterized.TestCase):

  def test_every_number_has_a_range(self):
    classes = {
        type(thing)
        for module in extreme_values.SHIPPED
        for _, thing in extreme_values.objects(module.experiment())
    }
    self.assertGreater(len(classes), 20)
    for cls in (*classes, *_OTHERS):
      numbers = {
          name
          for name, hint in typing.get_type_hints(cls).items()
          if extreme_values.is_number(hint)
      }
      self.assertLessEqual(numbers, set(checks.declared(cls)), cls)

  @parameterized.parameters(*extreme_values.SHIPPED)
  def test_no_value_makes_a_traceback(self, module):
    """Whatever a config accepts is inside the range that it declares."""
    accepted = refused = 0
    for path in extreme_values.numbers(extreme_values.here(module)):
      for value in extreme_values.VALUES:
        if _edited(module, path, value) is None:
          refused += 1
        else:
          accepted += 1
    self.assertGreater(accepted, 50)
    self.assertGreater(refused, 200)

  def test_an_accepted_value_passes_or_fails_all_checks_of_a_dry_run(self):
    cases = [
        (module, path, value)
        for module in extreme_values.SHIPPED
        for path in extreme_values.numbers(extreme_values.here(module))
        for value in extreme_values.VALUES
    ]
    passed = refused = 0
    for module, path, value in random.Random(0).sample(cases, 8 * _SAMPLED):
      cfg = _edited(module, path, value)
      if cfg is None or passed + refused == _SAMPLED:
        continue
      with self.subTest(f'{cfg.name}: {path}={value}'):
        try:
          preflight.check(cfg, rl=True, memory_bytes=2**60)
          plan.text(cfg)
          passed += 1
        except ValueError as e:
          self.assertNotIn('\n', str(e))
          refused += 1
    self.assertGreater(passed, 10)


class DryRunTest(parameterized.TestCase):

  def _refused(self, *edits):
    folder = pathlib.Path(self.create_tempdir().full_path) / 'run'
    command = small_run.command('rl', folder, *edits)
    done = small_run.finished([*command, '--dry_run'])
    self.assertEqual(done.returncode, 2, done.stdout + done.stderr)
    self.assertRegex(done.stderr, r'\Arl: error: [^\n]*\n\Z')
    self.assertFalse(folder.exists())
    return done.stderr

  @parameterized.parameters(
      ('model.vocab=10', 'vocab=10: must be at least 317'),
      ('rl.rows_per_batch=1', 'rows_per_batch=1: must be a positive multiple'),
      ('model.embed=1000000', 'takes about .* GiB, most of it for .*: lower'),
      ('corpus.path=/nowhere', 'nowhere.*no such directory'),
  )
  def test_what_only_the_run_would_have_found(self, edit, message):
    self.assertRegex(self._refused(edit), message)

  def test_a_run_of_the_least_values_works(self):
    workdir = pathlib.Path(tempfile.mkdtemp(dir=self.create_tempdir()))
    least = (
        *('rl.steps=1', 'rl.groups_per_step=1', 'rl.rollouts_per_group=2'),
        *('rl.candidates_per_prompt=1', 'rl.norm_tokens=1', 'rl.workers=1'),
        *('rl.withhold_staleness_versions=0', 'rl.max_staleness_versions=0'),
        *('rl.checkpoint_every_steps=1', 'rl.eval_every_steps=1'),
        *('rollout.slots=1', 'rollout.steps_per_sync=1'),
        *('rollout.prefill_tokens=4', 'harness.max_turns=1'),
        *('harness.max_turn_tokens=1', 'harness.tool_output_bytes=1'),
        *('evaluation.tasks=1', 'evaluation.showcase=0', 'evaluation.seed=0'),
        *('weights.tile_elements=64', 'weights.base_every_versions=1'),
        *('weights.skip_every_versions=1', 'weights.keep_bases=1'),
        *('weights.raw_above_changed_fraction=0', 'seed=0', 'tasks.seed=0'),
        *('phases.midtrain.steps=1', 'phases.warmup.steps=1'),
        *('model.layers=1', 'model.experts=1', 'model.top_k=1'),
        *('model.embed=1', 'model.q_heads=1', 'model.head_dim=2'),
        *('model.moe_ffn=1', 'corpus.heldout_fraction=0'),
    )
    done = small_run.run('rl', workdir / 'run', *least)
    self.assertEqual(done.returncode, 0, done.stdout + done.stderr)


if __name__ == '__main__':
  absltest.main()
