"""Records of steps in files: nothing lost, altered or paid for twice."""

import dataclasses
import json
import pathlib

from absl.testing import absltest
from absl.testing import parameterized
import hypothesis
from hypothesis import strategies as st
import zstandard

from composer_jax.fleet import facts
from composer_jax.fleet import history
from composer_jax.fleet import ledger as ledger_lib
from tests import fleet_sim


def step(number, groups=2, members=2):
  """A step that consumed its own prompts, each on a task of its own."""
  records = [
      ledger_lib.GroupRecord(
          prompt,
          number,
          '',
          f'{prompt:064x}',
          tuple(
              ledger_lib.RolloutRecord(
                  m,
                  17 * prompt + m,
                  'valid',
                  (((number, 80), (number + 1, 9)),),
              )
              for m in range(members)
          ),
          3 * prompt,
          'kind',
          0.5,
          0.25,
      )
      for prompt in range(groups * number, groups * (number + 1))
  ]
  return ledger_lib.StepRecord(
      number, f'd{number}', (*records[1:],), (records[0],)
  )


def grown(ledger, steps, **sizes):
  """The ledger after some more steps."""
  for number in range(ledger.done, ledger.done + steps):
    ledger = ledger_lib._extend(ledger, step(number, **sizes))
    ledger = dataclasses.replace(
        ledger, next_prompt=ledger.consumed[-1][1], cursor=9 * number
    )
  return ledger


class HistoryTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.workdir = pathlib.Path(self.create_tempdir().full_path)

  def saved(self, ledger):
    """What a run restores from the checkpoint."""
    ledger = history.append(self.workdir, ledger)
    return ledger_lib.from_json(ledger_lib.to_json(ledger))

  def files(self):
    return sorted(history.folder(self.workdir).glob('*'))

  @hypothesis.given(st.lists(st.integers(0, 4), max_size=6))
  def test_all_records_come_back_whenever_it_was_saved(self, saves):
    self.workdir = pathlib.Path(self.create_tempdir().full_path)
    whole = ledger = ledger_lib.Ledger()
    for steps in saves:
      whole = grown(whole, steps)
      ledger = self.saved(grown(ledger, steps))
      self.assertEmpty(ledger.recent)
    ledger = grown(ledger, 1)  # not saved yet
    whole = grown(whole, 1)
    self.assertEqual(history.read(self.workdir, ledger), whole.recent)
    kept = dataclasses.replace(ledger, head='', recent=whole.recent)
    self.assertEqual(kept, whole)

  def test_what_a_kill_undid_is_removed_and_written_anew(self):
    ledger = self.saved(grown(ledger_lib.Ledger(), 3))
    lost = grown(ledger, 2)
    history.append(self.workdir, lost)  # killed before its checkpoint
    history.cut_back(self.workdir, ledger.done)
    self.assertLen(self.files(), 1)
    again = self.saved(grown(ledger, 1))
    self.assertLen(history.read(self.workdir, again), 4)

  @parameterized.parameters('missing', 'cut', 'altered', 'exchanged')
  def test_a_file_that_is_not_what_was_written_is_refused(self, how):
    ledger = ledger_lib.Ledger()
    for _ in range(3):
      ledger = self.saved(grown(ledger, 2))
    path = self.files()[1]
    if how == 'missing':
      path.unlink()
    if how == 'cut':
      path.write_bytes(path.read_bytes()[:-20])
    if how == 'altered':
      text = zstandard.ZstdDecompressor().decompress(path.read_bytes())
      other = text.replace(b'"valid"', b'"infra"', 1)
      path.write_bytes(zstandard.ZstdCompressor().compress(other))
    if how == 'exchanged':
      path.write_bytes(self.files()[0].read_bytes())
    with self.assertRaisesRegex(ValueError, f'^{path}: [^\n]*; [^\n]*$'):
      history.read(self.workdir, ledger)

  def test_a_ledger_of_other_records_is_refused(self):
    ledger = self.saved(grown(ledger_lib.Ledger(), 2))
    other = dataclasses.replace(ledger, consumed=((0, 3),), next_prompt=3)
    with self.assertRaisesRegex(ValueError, 'its steps and its consumed'):
      history.read(self.workdir, other)

  def test_the_ledger_that_held_all_records_goes_on(self):
    whole = grown(ledger_lib.Ledger(), 3)
    data = json.loads(ledger_lib.to_json(whole))
    old = {
        'format': 2,
        'steps': data['recent'],
        **{
            name: data[name]
            for name in ('cursor', 'next_prompt', 'consumed', 'in_flight')
        },
    }
    self.assertEqual(ledger_lib.from_json(json.dumps(old)), whole)
    ledger = self.saved(grown(self.saved(whole), 1))
    self.assertLen(history.read(self.workdir, ledger), 4)

  def test_a_checkpoint_of_a_long_run_is_small(self):
    # 1,024,000 rollouts, on every third task.
    long = grown(ledger_lib.Ledger(), 125, groups=64, members=128)
    saved = dataclasses.replace(long, head='0' * 64, recent=())
    self.assertLess(len(ledger_lib.to_json(saved)), 8000 * 16)
    self.assertEqual(ledger_lib.from_json(ledger_lib.to_json(saved)), saved)


class SizeTest(absltest.TestCase):

  def test_facts_of_a_long_rollout_are_small(self):
    # Eight windows, weights that moved five times in each of them.
    versions = [v for v in range(6) for _ in range(300)]
    t = fleet_sim.rollout('run-0123456789ab/123456/127', 1.0, versions)
    t = dataclasses.replace(
        t,
        segments=t.segments * 8,
        weights={v: f'{v:064x}' for v in range(6)},
        meta={'index': '123456', 'stratum': 'repair/three files', 'turns': '9'},
        reward_parts={'tests': 1.0, 'style': 0.5, 'judge': 0.25},
    )
    self.assertLess(len(facts.to_json(facts.of(t))), 2048)


if __name__ == '__main__':
  absltest.main()
