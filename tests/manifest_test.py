"""The manifest: complete, atomic, and honest about a changed machine."""

import dataclasses
import importlib.metadata
import json
import os
import pathlib

from absl.testing import absltest
from absl.testing import parameterized
import jax

from composer_jax import config
from composer_jax import config_text
from composer_jax.learner import losses
from composer_jax.learner import optimizer
from composer_jax.runs import manifest


def _experiment(steps=100):
  adam = optimizer.AdamW()
  return config.Experiment(
      name='test',
      loss=losses.NextToken(),
      advantage=None,
      tasks=None,
      rewards=(),
      phases=(),
      rl_optimizer=adam,
      rl=config.RlConfig(steps=steps),
  )


def _facts(cfg, **changes):
  args = dict(
      devices=jax.devices(),
      contract={'ROWS': 8, 'KEY_BLOCK': 32},
      xla_flags='--xla_x',
      command='python3 -m experiments.rl',
  )
  return manifest.build(cfg, **args | changes)


class ManifestTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.workdir = pathlib.Path(self.create_tempdir().full_path)

  def test_facts_are_json_and_complete(self):
    cfg = _experiment()
    facts = json.loads(json.dumps(_facts(cfg)))
    self.assertEqual(facts['config'], config_text.digest(cfg))
    self.assertEqual(facts['devices'], {'cpu cpu': 4})
    self.assertEqual(facts['mesh'], dataclasses.asdict(cfg.mesh))
    self.assertEqual(facts['versions']['jax'], jax.__version__)
    self.assertEqual(facts['contract'], {'ROWS': 8, 'KEY_BLOCK': 32})
    self.assertNotEmpty(facts['processor'])
    self.assertEqual(facts['xla_flags'], '--xla_x')

  def test_contract_digest_depends_on_values_not_order(self):
    cfg = _experiment()
    digest = lambda c: _facts(cfg, contract=c)['contract_digest']
    self.assertEqual(digest({'a': 1, 'b': 2}), digest({'b': 2, 'a': 1}))
    self.assertNotEqual(digest({'a': 1, 'b': 2}), digest({'a': 2, 'b': 2}))

  def test_begin_then_resume(self):
    cfg = _experiment()
    self.assertFalse(manifest.is_run(self.workdir))
    self.assertEqual(manifest.begin(self.workdir, cfg, _facts(cfg)), [])
    self.assertTrue(manifest.is_run(self.workdir))
    stored = (self.workdir / manifest.CONFIG_FILE).read_text()
    self.assertEqual(config_text.from_json(stored), cfg)

    longer = _experiment(steps=300)
    facts = _facts(longer) | {'commit': 'b' * 40, 'processors': 99}
    changed = manifest.begin(self.workdir, longer, facts)
    self.assertEqual([c.field for c in changed], ['commit', 'processors'])
    self.assertFalse(any(c.numeric for c in changed))
    head = json.loads((self.workdir / manifest.FILE).read_text())
    self.assertEqual(head['processors'], os.cpu_count())
    (resume,) = head['history']
    self.assertFalse(resume['accepted_numeric_change'])
    self.assertEqual(resume['changed']['processors'], [os.cpu_count(), 99])
    # Compared with the last start: nothing is reported twice.
    self.assertEqual(manifest.begin(self.workdir, longer, facts), [])

  @parameterized.parameters(
      ('contract.ROWS', {'contract': {'ROWS': 16, 'KEY_BLOCK': 32}}, 8, 16),
      ('xla_flags', {'xla_flags': '--xla_y'}, '--xla_x', '--xla_y'),
      ('devices', {'devices': []}, {'cpu cpu': 4}, {}),
      ('versions.jaxlib', {}, importlib.metadata.version('jaxlib'), '0.0.1'),
      ('versions.triton', {}, None, '0.0.1'),
      ('processor', {}, None, 'another'),
      ('mesh.data', {}, 2, 4),
  )
  def test_changed_numeric_contract(self, field, changes, before, now):
    cfg = _experiment()
    first, facts = _facts(cfg), _facts(cfg, **changes)
    if not changes:
      group, _, name = field.rpartition('.')
      (facts[group] if group else facts)[name] = now
      (first[group] if group else first)[name] = before
    manifest.begin(self.workdir, cfg, first)
    files = {p.name: p.read_bytes() for p in self.workdir.iterdir()}
    with self.assertRaises(ValueError) as refused:
      manifest.begin(self.workdir, cfg, facts)
    text = str(refused.exception)
    self.assertIn(f'{field} {before!r} -> {now!r}', text)
    self.assertIn('--accept_numeric_change', text)
    self.assertNotIn('\n', text)
    after = {p.name: p.read_bytes() for p in self.workdir.iterdir()}
    self.assertEqual(after, files)

    (change,) = manifest.begin(self.workdir, cfg, facts, accept=True)
    self.assertEqual(change, manifest.Change(field, before, now, True))
    head = json.loads((self.workdir / manifest.FILE).read_text())
    (resume,) = head['history']
    self.assertTrue(resume['accepted_numeric_change'])
    self.assertEqual(resume['changed'], {field: [before, now]})
    # Accepted once and for all; going back is a change again.
    self.assertEqual(manifest.begin(self.workdir, cfg, facts), [])
    with self.assertRaisesRegex(ValueError, f'{field} '):
      manifest.begin(self.workdir, cfg, first)

  def test_another_config_leaves_the_run_untouched(self):
    cfg = _experiment()
    manifest.begin(self.workdir, cfg, _facts(cfg))
    before = {p.name: p.read_bytes() for p in self.workdir.iterdir()}
    other = config_text.override(cfg, 'model.layers=5')
    with self.assertRaisesRegex(ValueError, 'model.layers 3 -> 5'):
      manifest.begin(self.workdir, other, _facts(other))
    after = {p.name: p.read_bytes() for p in self.workdir.iterdir()}
    self.assertEqual(after, before)

  def test_killed_between_its_two_files_starts_afresh(self):
    cfg = _experiment()
    manifest.begin(self.workdir, cfg, _facts(cfg))
    (self.workdir / manifest.CONFIG_FILE).unlink()
    self.assertTrue(manifest.is_run(self.workdir))
    self.assertEqual(manifest.begin(self.workdir, cfg, _facts(cfg)), [])
    self.assertTrue((self.workdir / manifest.CONFIG_FILE).exists())

  def test_a_foreign_manifest_is_no_run(self):
    for text in ('', '{', '[]', '{"format": "other"}'):
      (self.workdir / manifest.FILE).write_text(text)
      self.assertFalse(manifest.is_run(self.workdir), text)


if __name__ == '__main__':
  absltest.main()
