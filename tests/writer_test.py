"""metrics.jsonl survives kills and resumes; TensorBoard says the same."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile

from absl.testing import absltest
from absl.testing import parameterized
from composer_jax.runs import writer
from tensorboardX.proto import event_pb2

_CHILD = """
import sys
from composer_jax.runs import writer
w = writer.Writer(sys.argv[1])
step = 0
while True:
  step += 1
  w.write('rl', step, {'reward/mean': step / 7, 'pad' * 50: 1.0})
  if step == 20:
    print('running', flush=True)
"""


def _records(workdir: pathlib.Path) -> list[dict]:
  text = (workdir / writer.METRICS).read_text()
  return [json.loads(x) for x in text.splitlines()]


def _events(folder: pathlib.Path) -> list[event_pb2.Event]:
  """Every event of a TensorBoard folder, decoded from its records."""
  events = []
  for path in sorted(folder.iterdir()):
    data, at = path.read_bytes(), 0
    while at < len(data):
      size = int.from_bytes(data[at : at + 8], 'little')
      events.append(event_pb2.Event.FromString(data[at + 12 :][:size]))
      at += 16 + size
  return events


class WriterTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.workdir = pathlib.Path(
        self.enterContext(tempfile.TemporaryDirectory())
    )

  def _write(self, steps, resume=None, phase='rl'):
    with writer.Writer(self.workdir, resume) as w:
      for step in steps:
        w.write(phase, step, {'reward/mean': step * 0.5})

  def test_record_is_flat_json_with_exact_values(self):
    with writer.Writer(self.workdir) as w:
      w.write('rl', 3, {'a/b': 0.1, 'staleness/histogram': [4, 0, 1]})
    (record,) = _records(self.workdir)
    self.assertEqual(
        {k: record[k] for k in ('phase', 'step', 'a/b', 'staleness/histogram')},
        {
            'phase': 'rl',
            'step': 3,
            'a/b': 0.1,
            'staleness/histogram': [4.0, 0.0, 1.0],
        },
    )
    self.assertGreaterEqual(record['seconds'], 0.0)

  def test_non_finite_stays_valid_json(self):
    with writer.Writer(self.workdir) as w:
      w.write('rl', 1, {'peak': float('-inf'), 'nan': float('nan')})
    text = (self.workdir / writer.METRICS).read_text()

    def refuse(token):
      self.fail(f'{token} is not json')

    record = json.loads(text, parse_constant=refuse)
    self.assertIsNone(record['peak'])
    self.assertIsNone(record['nan'])

  def test_record_is_on_disk_before_close(self):
    w = writer.Writer(self.workdir)
    self.addCleanup(w.close)
    w.write('rl', 1, {'x': 1.0})
    self.assertLen(_records(self.workdir), 1)

  @parameterized.parameters(1, 5, 30)
  def test_torn_last_line_is_dropped(self, cut):
    self._write([1, 2, 3])
    path = self.workdir / writer.METRICS
    path.write_bytes(path.read_bytes()[:-cut])
    self._write([3, 4])
    self.assertEqual([r['step'] for r in _records(self.workdir)], [1, 2, 3, 4])

  def test_damage_inside_is_refused_with_its_line(self):
    self._write([1, 2, 3])
    path = self.workdir / writer.METRICS
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(lines[0] + '{"phase": "rl"\n' + lines[2])
    with self.assertRaisesRegex(ValueError, 'line 2'):
      writer.Writer(self.workdir)

  def test_resume_drops_later_records_of_the_named_phases_only(self):
    self._write([1, 2, 3, 4, 5], phase='midtrain')
    self._write([1, 2, 3, 4])
    self._write([2, 4], phase='eval')
    self._write([3, 4], {'rl': 2, 'eval': 2})
    got = [(r['phase'], r['step']) for r in _records(self.workdir)]
    self.assertEqual(
        got,
        [('midtrain', s) for s in (1, 2, 3, 4, 5)]
        + [('rl', 1), ('rl', 2), ('eval', 2), ('rl', 3), ('rl', 4)],
    )

  def test_seconds_go_on_after_a_resume(self):
    self._write([1])
    path = self.workdir / writer.METRICS
    record = json.loads(path.read_text()) | {'seconds': 1000.0}
    path.write_text(json.dumps(record) + '\n')
    self._write([2], {'rl': 1})
    self.assertGreaterEqual(_records(self.workdir)[1]['seconds'], 1000.0)

  def test_reserved_name_is_refused(self):
    w = writer.Writer(self.workdir)
    self.addCleanup(w.close)
    with self.assertRaisesRegex(ValueError, "'step'"):
      w.write('rl', 1, {'step': 2.0})

  def test_kill_9_leaves_a_file_that_reopens(self):
    child = subprocess.Popen(
        [sys.executable, '-c', _CHILD, str(self.workdir)],
        stdout=subprocess.PIPE,
        env=os.environ | {'PYTHONPATH': os.pathsep.join(sys.path)},
    )
    child.stdout.readline()
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    self._write([11], {'rl': 10})
    steps = [r['step'] for r in _records(self.workdir)]
    self.assertEqual(steps, list(range(1, 12)))

  def test_tensorboard_has_the_same_figures_and_purges_on_resume(self):
    self._write([1, 2, 3])
    with writer.Writer(self.workdir, {'rl': 1}) as w:
      w.write('rl', 2, {'reward/mean': 9.0, 'staleness/histogram': [3, 0, 1]})
    scalars, histograms, purges = [], [], []
    for event in _events(self.workdir / 'tb' / 'rl'):
      if event.session_log.status:
        purges.append(event.step)
      for value in event.summary.value:
        if value.HasField('histo'):
          histograms.append((event.step, value.tag, list(value.histo.bucket)))
        else:
          scalars.append((event.step, value.tag, value.simple_value))
    self.assertCountEqual(
        scalars,
        [(s, 'reward/mean', s * 0.5) for s in (1, 2, 3)]
        + [(2, 'reward/mean', 9.0)],
    )
    self.assertEqual(purges, [2])
    self.assertEqual(histograms, [(2, 'staleness/histogram', [3.0, 0.0, 1.0])])


if __name__ == '__main__':
  absltest.main()
