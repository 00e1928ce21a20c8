"""Typed overrides, text form, and what a resumed run may change."""

import dataclasses
import json
import typing

from absl.testing import absltest
from absl.testing import parameterized
import hypothesis
from hypothesis import strategies as st

from composer_jax import config
from composer_jax import config_text


@dataclasses.dataclass(frozen=True)
class Clip:
  low: float = 0.2
  high: float | None = None


@dataclasses.dataclass(frozen=True)
class SoftClip:
  width: float = 0.3
  power: int = 2
  on: bool = True
  kind: typing.Literal['token', 'sequence'] = 'token'
  axes: tuple[int, ...] = (1, 2)
  bounds: tuple[float, float] = (0.0, 1.0)
  label: str | None = None
  clip: Clip = Clip()


async def reward(task, episode):
  del task, episode


def _experiment(**changes):
  fields = dict.fromkeys(('advantage', 'rl_optimizer'))
  fields['phases'] = (
      config.PhaseConfig('short', Clip(), 3, 2, 64),
      config.PhaseConfig('long', Clip(), 3, 1, 128),
  )
  fields |= {'loss': SoftClip(), 'tasks': Clip(), 'rewards': (Clip(), reward)}
  return config.Experiment(name='test', **fields | changes)


class OverrideTest(parameterized.TestCase):

  @parameterized.parameters(
      ('rl.steps=50', lambda e: e.rl.steps, 50),
      ('rl.steps=1_000', lambda e: e.rl.steps, 1000),
      ('seed=3', lambda e: e.seed, 3),
      ('name=fast run', lambda e: e.name, 'fast run'),
      ('name=7', lambda e: e.name, '7'),
      ('name=a=b', lambda e: e.name, 'a=b'),
      ("name='7'", lambda e: e.name, '7'),
      ('loss.width=2', lambda e: e.loss.width, 2.0),
      ('loss.width=1e-3', lambda e: e.loss.width, 1e-3),
      ('loss.on=False', lambda e: e.loss.on, False),
      ('loss.on=false', lambda e: e.loss.on, False),
      ('loss.kind=sequence', lambda e: e.loss.kind, 'sequence'),
      ('loss.axes=(3,)', lambda e: e.loss.axes, (3,)),
      ('loss.axes=3,4,5', lambda e: e.loss.axes, (3, 4, 5)),
      ('loss.axes=()', lambda e: e.loss.axes, ()),
      ('loss.bounds=(1, 2.5)', lambda e: e.loss.bounds, (1.0, 2.5)),
      ('loss.label=x', lambda e: e.loss.label, 'x'),
      ('loss.clip.high=3', lambda e: e.loss.clip.high, 3.0),
      ('loss.clip.high=None', lambda e: e.loss.clip.high, None),
      ('corpus.path=/src', lambda e: e.corpus.path, '/src'),
      ('corpus.path=None', lambda e: e.corpus.path, None),
      ('rewards.0.low=1', lambda e: e.rewards[0].low, 1.0),
      ('phases.long.steps=9', lambda e: e.phases[1].steps, 9),
      (
          'phases.short.mix=(("demos", 1), ("code", 2.5))',
          lambda e: e.phases[0].mix,
          (('demos', 1.0), ('code', 2.5)),
      ),
  )
  def test_sets_one_field(self, assignment, get, want):
    before = _experiment()
    after = config_text.override(before, assignment)
    self.assertEqual(get(after), want)
    self.assertIs(type(get(after)), type(want))
    changed = config_text.diff(
        config_text.to_json(before), config_text.to_json(after)
    )
    path = assignment.partition('=')[0]
    self.assertEqual({k for k in changed if not k.startswith(path)}, set())
    self.assertEqual(before, _experiment())

  @parameterized.parameters(
      ('rl.stesp=5', r"RlConfig has no field 'stesp'; did you mean 'steps'\?"),
      ('rll.steps=5', r"did you mean 'rl'\?"),
      ('zzzz=5', r"'zzzz'; it has name, loss,"),
      ('rl.steps=1.5', r"--set=rl.steps=1.5: want int, got '1.5'"),
      ('rl.steps=True', "want int, got 'True'"),
      ('rl.steps=None', "want int, got 'None'"),
      ('rl.steps=many', "want int, got 'many'"),
      ('rl.steps=', "want int, got ''"),
      ('loss.width=True', 'want float'),
      ('loss.width=nan', 'want float'),
      ('loss.on=1', "want bool, got '1'"),
      ('loss.kind=tokn', r"want Literal\['token', 'sequence'\], got 'tokn'"),
      ('loss.axes=1', r"want tuple\[int, \.\.\.\], got '1'"),
      ('loss.axes=(1, 2.5)', 'want tuple'),
      ('loss.bounds=(1,)', 'want tuple'),
      ('loss.clip.high=x', r'want float \| None'),
      ('loss=3', r'this is a SoftClip object; .*\(width, power, on'),
      ('rl=3', 'this is a RlConfig object'),
      ('rl.steps.x=3', 'steps is a value'),
      ('rewards.5.low=1', "tuple has no field '5'"),
      ('rl.steps', 'want FIELD=VALUE'),
      ('model.top_k=99', r'model.top_k=99: ModelConfig.top_k=99: must be in'),
      ('model.q_heads=3', 'must be a multiple of kv_heads=2'),
  )
  def test_refuses_with_one_line(self, assignment, message):
    with self.assertRaisesRegex(ValueError, message) as caught:
      config_text.override(_experiment(), assignment)
    self.assertNotIn('\n', str(caught.exception))
    self.assertIn('--set=', str(caught.exception))

  def test_fields_that_constrain_each_other_change_together(self):
    out = config_text.override(
        _experiment(), 'model.q_heads=9', 'model.kv_heads=3', 'rl.steps=4'
    )
    self.assertEqual((out.model.q_heads, out.model.kv_heads), (9, 3))
    self.assertEqual(out.rl.steps, 4)

  def test_last_assignment_wins(self):
    out = config_text.override(_experiment(), 'rl.steps=4', 'rl.steps=9')
    self.assertEqual(out.rl.steps, 9)

  @hypothesis.given(st.floats(allow_nan=False, allow_infinity=False))
  @hypothesis.settings(deadline=None, max_examples=50)
  def test_every_float_survives(self, x):
    out = config_text.override(SoftClip(), f'width={x!r}')
    self.assertEqual(out.width, x)


class TextTest(parameterized.TestCase):

  def test_round_trip(self):
    e = _experiment(loss=SoftClip(clip=Clip(0.1, 2.0), label='x'))
    text = config_text.to_json(e)
    back = config_text.from_json(text)
    self.assertEqual(back, e)
    self.assertEqual(hash(back.loss), hash(e.loss))
    self.assertEqual(config_text.to_json(back), text)
    self.assertEqual(json.loads(text)['loss']['type'], f'{__name__}:SoftClip')

  def test_digest_follows_every_field(self):
    e = _experiment()
    other = config_text.override(e, 'loss.clip.low=0.21')
    self.assertEqual(config_text.digest(e), config_text.digest(_experiment()))
    self.assertNotEqual(config_text.digest(e), config_text.digest(other))

  def test_refuses_what_has_no_text(self):
    with self.assertRaisesRegex(ValueError, r'Experiment.loss=.*not set'):
      config_text.to_json(_experiment(loss={1, 2}))

  def test_unknown_class_is_named(self):
    with self.assertRaisesRegex(ValueError, 'no_such_module:X cannot be'):
      config_text.from_json('{"type": "no_such_module:X"}')

  def test_resume_names_every_field_that_differs(self):
    start = _experiment()
    stored = config_text.to_json(start)
    now = config_text.override(
        start, 'rl.steps=500', 'loss.width=0.5', 'model.layers=4'
    )
    with self.assertRaisesRegex(
        ValueError, r'\(loss.width 0.3 -> 0.5; model.layers 3 -> 4\)'
    ):
      config_text.check_resume(stored, now)

  def test_resume_notices_another_object(self):
    stored = config_text.to_json(_experiment())
    with self.assertRaisesRegex(ValueError, 'loss.type .*SoftClip.*Clip'):
      config_text.check_resume(stored, _experiment(loss=Clip()))

  def test_resume_may_run_longer(self):
    start = _experiment()
    stored = config_text.to_json(start)
    for field in config_text.MAY_CHANGE:
      edit = f'{field}={"true" if "stop" in field else 170}'
      config_text.check_resume(stored, config_text.override(start, edit))


if __name__ == '__main__':
  absltest.main()
