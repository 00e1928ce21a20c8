"""A made-up work directory with every file of a finished run."""

import json
import math
import pathlib
import re

from composer_jax import config
from composer_jax import trace
from composer_jax.runs import writer
import numpy as np

_PROMPT = (
    '<|bos|><|task|><|0|>def f(a):<|1|> h=[]<|2|> for q in a:'
    '<|3|>  if q<3:h+=[q]<|4|> return h<|case|>[4,1,9]=[4,9]<|act|>'
)
_EDIT = ('<|edit|>', '<|3|>', '<', '<|to|>')


def _midtrain(out: writer.Writer, rng: np.random.Generator) -> None:
  for step in range(1, 81):
    loss = 1.6 + 4.5 * math.exp(-step / 18) + rng.normal(0, 0.03)
    figures = {'loss': loss, 'tokens_per_second': 12_900 + rng.normal(0, 200)}
    figures |= {'grad_norm': 0.4 + math.exp(-step / 10)}
    if step % 10 == 0:
      figures['bits_per_byte'] = loss / math.log(2) / 1.9
    out.write('midtrain', step, figures)
  for step in range(1, 41):
    loss = 0.5 + 1.2 * math.exp(-step / 8) + rng.normal(0, 0.02)
    out.write('warmup', step, {'loss': loss, 'tokens_per_second': 13_100})


def _rl_step(step: int, rng: np.random.Generator) -> dict:
  skill = 1 - math.exp(-step / 35)
  reward = 0.15 + 0.45 * skill + rng.normal(0, 0.035)
  ages = rng.multinomial(1_500, [0.48, 0.37, 0.13, 0.02])
  changed = 0.55 + 0.1 * math.exp(-step / 20) + rng.normal(0, 0.01)
  bits = 8.9 + rng.normal(0, 0.1)
  return {
      'reward/mean': reward,
      'reward/best_of_group': min(1.0, reward + 0.32),
      'group/zero_variance_fraction': 0.3 + 0.5 * skill,
      'group/invalid': 0.0,
      'entropy': 1.4 - 0.9 * skill + rng.normal(0, 0.02),
      'grad_norm': abs(rng.normal(0.3, 0.06)),
      'loss': rng.normal(0, 0.02),
      'mismatch/kl_same_version': 0.0,
      'mismatch/kl_stale': abs(rng.normal(6e-3, 2e-3)),
      'mismatch/max_log_ratio': abs(rng.normal(0.8, 0.3)),
      'mismatch/same_version_share': 0.25,
      'loss/dropped_positive': abs(rng.normal(0.02, 0.005)),
      'loss/dropped_negative': abs(rng.normal(0.01, 0.004)),
      'loss/capped': 0.0,
      'staleness/token_mean': float(ages @ np.arange(4)) / 1_500,
      'staleness/token_p95': 2.0,
      'staleness/token_max': float(np.flatnonzero(ages)[-1]),
      'staleness/spanning_fraction': 0.2,
      'staleness/submit_lag_mean': 0.6 + rng.normal(0, 0.05),
      'staleness/histogram': ages.tolist(),
      'weights/delta_bytes': changed * bits / 8 * 712_000,
      'weights/ratio': 16 / (changed * bits),
      'weights/changed_fraction': changed,
      'weights/bits_per_changed': bits,
      'time/step': 1.35 + rng.normal(0, 0.08),
      'time/train': 0.8 + rng.normal(0, 0.04),
      'time/wait_batch': abs(rng.normal(0.35, 0.06)),
      'time/wait_weights': 0.05,
      'time/rollout': 0.7 + rng.normal(0, 0.05),
      'time/environment': 0.25 + rng.normal(0, 0.03),
      'tokens/train_per_second': 12_000 + rng.normal(0, 400),
      'tokens/decode_per_second': 5_200 + rng.normal(0, 300),
      'routing/disagreement': 0.004 + abs(rng.normal(0, 1e-3)),
      'routing/blank': 0.01,
      'rollouts/valid': 192.0,
      'lost_rollouts': 0.0,
      'recompilations': 0.0,
  }


def _rl(out: writer.Writer, steps: int, rng: np.random.Generator) -> None:
  for step in range(steps + 1):
    if step:
      out.write('rl', step, _rl_step(step, rng))
    if step % 20 == 0:
      skill = 1 - math.exp(-step / 35)
      out.write(
          'eval',
          step,
          {
              'eval/pass1_sampled': 0.14 + 0.44 * skill,
              'eval/pass1_greedy': 0.24 + 0.35 * skill,
              'heldout_families/pass1_sampled': 0.03 + 0.03 * skill,
              'heldout_families/pass1_greedy': 0.04 + 0.01 * skill,
              'time/eval': 2.5,
          },
      )


def _side(reward: float, new: list[str], rng: np.random.Generator) -> dict:
  answer = (*_EDIT, *new, '<|done|>', '<|end|>')
  texts = [(c, False) for c in re.findall(r'<\|\w+\|>|\W|\w+', _PROMPT)]
  texts += [(c, True) for c in answer]
  tokens = []
  for text, sampled in texts:
    before = -abs(rng.normal(1.2, 0.8))
    gain = rng.normal(1.0 if reward else -1.0, 0.7)
    tokens.append(
        {
            'text': text,
            'sampled': sampled,
            'logp_before': before if sampled else None,
            'logp_after': min(-0.001, before + gain) if sampled else None,
            'experts': (
                [sorted(rng.choice(8, 2, False).tolist()) for _ in range(3)]
                if sampled
                else []
            ),
        }
    )
  return {'reward': reward, 'submission': ''.join(answer), 'tokens': tokens}


def _showcase(rng: np.random.Generator) -> dict:
  families = ('keep_above', 'sum', 'maximum', 'reverse', 'differences')
  return {
      'tasks': [
          {
              'task_id': f'eval/{i}',
              'family': family,
              'prompt': _PROMPT,
              'before': _side(0.0, ['<='], rng),
              'after': _side(float(i != 3), ['>', '\n'], rng),
          }
          for i, family in enumerate(families)
      ]
  }


def _summary(steps: int) -> dict:
  return {
      'heldout_pass1_sampled': {'before': 0.14, 'after': 0.57},
      'heldout_pass1_greedy': {'before': 0.24, 'after': 0.58},
      'heldout_families': {
          'sampled': {'before': 0.03, 'after': 0.06},
          'greedy': {'before': 0.04, 'after': 0.05},
      },
      'evaluation': {
          'tasks': 256,
          'chance': 0.2,
          'chance_heldout_families': 0.15,
          'distinct_instances': {'warmup': 9_000, 'train': 1_900},
      },
      'heldout_bits_per_byte': {'midtrain': {'before': 4.5, 'after': 2.6}},
      'train_reward': {'first': 0.16, 'last': 0.59},
      'mismatch_kl_same_version': 0.0,
      'audit': {
          'trajectories': 32,
          'tokens': 2_304,
          'versions': 8,
          'max_abs_dlogp': 0.0,
          'routing_differences': 0,
          'digest_mismatches': 0,
      },
      'weights': {
          'versions_published': steps + 1,
          'digest_mismatches': 0,
          'mean_changed_fraction': 0.57,
          'bits_per_changed': 8.9,
          'ratio': 3.2,
      },
      'staleness': {'mean': 0.69, 'max': 3},
      'lost_rollouts': 0,
      'recompilations': 0,
      'seconds': {'midtrain': 142.0, 'rl': 201.0, 'eval': 31.0},
      'tokens_per_second': {'train': 12_040.0, 'decode': 5_210.0},
  }


def trajectory(member: int = 0) -> trace.Trajectory:
  """A rollout whose tokens were made under versions 3 and 4."""
  rng = np.random.default_rng(member)
  n = 24
  sampled = np.arange(n) >= 16
  experts = rng.integers(0, 8, (n, 3, 2)).astype(np.uint8)
  experts[-1] = trace.blank_route(experts.dtype)
  segment = trace.TokenTrace(
      tokens=rng.integers(33, 126, n).astype(np.int32),
      sampled=sampled,
      logps=np.where(sampled, -0.5, 0.0).astype(np.float32),
      versions=np.where(np.arange(n) < 20, 3, 4).astype(np.int32),
      routing=trace.RoutingTrace(experts),
  )
  return trace.Trajectory(
      task_id=f'r0/7/{member}',
      group_id='r0/7',
      segments=(segment,),
      reward=1.0,
      reward_parts={'hidden_tests': 1.0},
      stop=trace.StopReason.FINISHED,
      weights={3: 'a' * 64, 4: 'b' * 64},
      meta={'family': 'reverse'},
  )


def write(workdir: pathlib.Path, steps: int = 100) -> pathlib.Path:
  """Fills a work directory; equal calls write equal figures."""
  rng = np.random.default_rng(0)
  with writer.Writer(workdir) as out:
    _midtrain(out, rng)
    _rl(out, steps, rng)
  files = {
      'config.json': {
          'type': 'composer_jax.config:Experiment',
          'name': 'tiny',
          'seed': 0,
          'rl': {'steps': steps, 'max_staleness_versions': 2},
          'model': vars(config.ModelConfig()),
          'evaluation': {'tasks': 256, 'showcase': 5},
      },
      'manifest.json': {
          'command': 'python3 -m experiments.quickstart --workdir=DIR',
          'versions': {'python': '3.11.7', 'jax': '0.10.2'},
          'host': {'cores': 2, 'platform': 'cpu'},
      },
      'summary.json': _summary(steps),
      'showcase.json': _showcase(rng),
  }
  for name, content in files.items():
    (workdir / name).write_text(json.dumps(content))
  folder = workdir / 'trajectories' / '000001'
  folder.mkdir(parents=True)
  for member in range(3):
    name = f'{member}.traj'
    (folder / name).write_bytes(trace.to_bytes(trajectory(member)))
  return workdir
