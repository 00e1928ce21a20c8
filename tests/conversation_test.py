"""A person's conversation: exact ids, streamed text, and how it is broken off."""

import pathlib
import subprocess

from absl.testing import absltest
import jax
import numpy as np
from tests import served_store
from tests import serving_kit as lib
from tests import small_run

from composer_jax.chat import template
from composer_jax.rollout import engine as engine_lib
from composer_jax.serving import conversation


def _engine():
  return engine_lib.Engine(
      lib.EXPERIMENT.model,
      lib.ROLLOUT,
      lib.version(0),
      lib.params(0),
      devices=jax.devices()[:1],
  )


class ConversationTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.engine = self.enter_context(_engine())
    self.form = template.compact(lib.tokenizer())
    self.talk = conversation.Conversation(self.engine, self.form)

  def _say(self, text, **sampling):
    shown = []
    chosen = conversation.Sampling(**({'max_tokens': 20} | sampling))
    reply, count = self.talk.say(text, chosen, shown.append)
    self.assertEqual(''.join(shown), reply.content or '')
    return reply, count

  def test_goes_on_from_exact_ids(self):
    self._say('add', seed=1)
    first = self.talk.window
    _, count = self._say('run', seed=2)
    second = self.talk.window
    n = len(first)
    for field in ('tokens', 'sampled', 'logps', 'versions'):
      np.testing.assert_array_equal(
          getattr(second, field)[:n], getattr(first, field)
      )
    self.assertEqual(second.sampled.sum(), first.sampled.sum() + count)
    lib.check_rescored(self, [second])

  def test_what_does_not_fit_changes_nothing(self):
    self._say('add')
    before = list(self.talk.messages)
    with self.assertRaisesRegex(ValueError, 'context_tokens'):
      self._say('a ' * 400)
    self.assertEqual(self.talk.messages, before)
    self._say('run')
    self.talk.system('be brief')
    self.assertLen(self.talk.messages, 1)
    self._say('add')

  def test_breaking_off_gives_the_slot_back(self):
    idle = self.engine.free()
    seen = []

    def stop(_):
      seen.append(None)
      raise KeyboardInterrupt

    with self.assertRaises(KeyboardInterrupt):
      conversation.sample(
          self.engine,
          conversation.graph.extend(
              None, self.form.prompt([{'role': 'user', 'content': 'add'}])
          ),
          frozenset(),
          conversation.Sampling(max_tokens=200),
          stop,
      )
    self.assertLen(seen, 1)
    lib.wait(lambda: self.engine.free() == idle)
    self.assertEqual(self.engine.stats().cancelled, 1)


class BinaryTest(absltest.TestCase):

  def test_talks_over_a_pipe(self):
    folder = pathlib.Path(self.create_tempdir().full_path)
    served_store.Store(folder)
    done = subprocess.run(
        [
            *small_run.command('chat', 'unused')[:3],
            f'--store={folder}/weights',
            f'--compilation_cache={small_run.CACHE}',
            '--max_tokens=8',
        ],
        input='/help\nadd\n/task\n/nope\n/temperature x\n/quit\nnever read\n',
        capture_output=True,
        text=True,
        check=True,
        cwd=small_run.ROOT,
        env=small_run.environment(),
    )
    self.assertIn('weights version 0', done.stdout)
    self.assertIn('/system TEXT', done.stdout)
    self.assertRegex(done.stdout, r'\[version 0; \d+ tokens, \d+ tokens/s')
    self.assertEqual(done.stdout.count('[version'), 1)
    for text in (
        '/task: needs --workdir',
        '/nope: no such command',
        '/temperature x: want',
    ):
      self.assertIn(text, done.stderr)
    self.assertNotIn('Traceback', done.stderr)


if __name__ == '__main__':
  absltest.main()
