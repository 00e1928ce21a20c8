"""What a dry run says of a mesh, against arrays and programs that exist."""

import collections
import dataclasses
import pathlib
import re
import subprocess
import sys

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
from tests import fresh
from tests import hub_configs
from tests import mesh_cases
from tests import small_config

from composer_jax import config
from composer_jax.learner import losses
from composer_jax.learner import step
from composer_jax.model import families
from composer_jax.model import flops
from composer_jax.model import params as params_lib
from composer_jax.model import sharding
from composer_jax.runs import footprint
from composer_jax.runs import plan
from experiments.configs import kimi_k2
from experiments.configs import qwen3_30b_a3b

_BIG = (
    ('qwen', qwen3_30b_a3b, hub_configs.QWEN3_30B_A3B),
    ('kimi', kimi_k2, hub_configs.KIMI_K2),
)


def _small(model, *axes):
  cfg = small_config.experiment()
  return dataclasses.replace(
      cfg,
      loss=losses.NextToken(),
      model=dataclasses.replace(model, remat=True),
      mesh=config.MeshConfig(*axes),
      rl=dataclasses.replace(cfg.rl, rows_per_batch=4),
  )


def _compiled(cfg):
  """Kind -> arrays of all its collectives, as XLA has them."""
  mesh, scalar = step.make_mesh(cfg.mesh), jax.ShapeDtypeStruct((), jnp.float32)
  tx = mesh_cases.optimizer_of('adamw')
  text = (
      step.gradients.lower(
          step.abstract_state(cfg.model, tx, mesh).params,
          footprint.batch(cfg, mesh),
          scalar,
          cfg=cfg.model,
          loss=cfg.loss,
          mesh=mesh,
          tokens=scalar,
      )
      .compile()
      .as_text()
  )
  bodies, name = collections.defaultdict(list), ''
  for line in text.splitlines():
    if line.endswith('{') and not line.startswith(' '):
      name = re.search(r'%?([\w.-]+) \(', line).group(1)
      name = 'ENTRY' if line.startswith('ENTRY') else name
    bodies[name].append(line)
  found = collections.Counter()

  def visit(name, times):
    for line in bodies[name]:
      op = re.search(
          r' (all-gather|reduce-scatter|all-reduce)(?:-start)?\((.*?)\)', line
      )
      if op:
        assert times is not None, line  # a loop of unknown length
        found[op[1]] += times * (op[2].count('%'))
      if body := re.search(r'body=%([\w.-]+)', line):
        known = re.search(r'"n":"(\d+)"', line)
        known = known and times and times * int(known[1])
        visit(body[1], known)
      elif called := re.search(r'(?:calls|to_apply)=%([\w.-]+)', line):
        visit(called[1], times)

  visit('ENTRY', 1)
  return found


class SmallTest(parameterized.TestCase):

  def test_bytes_and_collectives_are_those_of_the_run(self):
    cfg = _small(mesh_cases.LATENT, 1, 1, 2, 2)
    found = footprint.of(cfg)
    mesh = step.make_mesh(cfg.mesh)
    state = step.init_state(cfg.model, cfg.rl_optimizer.build(), 0, mesh)
    there = lambda tree: sum(
        x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree)
    )
    self.assertEqual(found.parameters, there(state.params))
    self.assertEqual(found.gradients, there(state.params))
    self.assertEqual(found.optimizer, there(state.opt_state))
    rows, tokens = 4 // cfg.mesh.row_shards, cfg.rl.tokens_per_row
    routes = cfg.model.moe_layers * cfg.model.top_k
    self.assertEqual(found.batch, rows * tokens * (7 * 4 + 1 + routes))
    published = params_lib.publish_dtype(fresh.params(cfg.model))
    self.assertEqual(
        found.decoder, sum(x.nbytes for x in jax.tree.leaves(published))
    )
    said = collections.Counter()
    for c in found.collectives:
      said[c.kind] += c.count
    # XLA drops what nobody reads, such as metrics, and cuts other sums up.
    compiled = _compiled(cfg)
    kind = 'reduce-scatter'
    self.assertEqual(said[kind], compiled[kind])
    for kind, count in compiled.items():
      self.assertBetween(said[kind] / count, 0.8, 1.5, kind)
    text = plan.text(cfg, found)
    self.assertIn(f'{found.cache:,} bytes per token', text)
    self.assertNotIn('estimated', text)

  def test_bytes_go_around_a_ring(self):
    mesh = step.make_mesh(config.MeshConfig(1, 4))
    p = jax.sharding.PartitionSpec

    def local(x):
      def body(x, _):
        whole = jax.lax.all_gather(x, sharding.FSDP, tiled=True)
        return jax.lax.psum_scatter(whole, sharding.FSDP, tiled=True), None

      x, _ = jax.lax.scan(body, x, length=3)
      return jax.lax.psum(x, (sharding.DATA, sharding.FSDP))

    f = sharding.over_mesh(
        local, mesh, in_specs=(p(sharding.FSDP),), out_specs=p()
    )
    x = jax.ShapeDtypeStruct((16, 10), jnp.float32)
    traced = jax.jit(f).trace(x)
    fsdp = (sharding.FSDP,)
    self.assertCountEqual(
        footprint.collectives(traced.jaxpr, mesh.shape),
        [
            footprint.Collective('all-gather', fsdp, 3, 3 * 640 * 3 // 4),
            footprint.Collective('reduce-scatter', fsdp, 3, 3 * 640 * 3 // 4),
            footprint.Collective('all-reduce', fsdp, 1, 2 * 160 * 3 // 4),
        ],
    )


class BigTest(parameterized.TestCase):

  @parameterized.named_parameters(*_BIG)
  def test_sizes_are_those_of_the_hub(self, module, fields):
    model = dataclasses.replace(
        module.experiment().model, dtype='float32', remat=False
    )
    self.assertEqual(model, families.to_config(fields))

  @parameterized.named_parameters(*_BIG)
  def test_the_state_fits(self, module, _):
    """Parameters, moments and two sets of gradients in half a device."""
    cfg = module.experiment()
    plan.check(cfg)
    mesh = step.abstract_mesh(cfg.mesh)
    state = step.abstract_state(cfg.model, cfg.rl_optimizer.build(), mesh)
    size = footprint.held(state) + 2 * footprint.held(state.params)
    self.assertLess(size, 70e9)
    whole = 4 * params_lib.count(cfg.model)[0] // cfg.mesh.devices
    self.assertBetween(footprint.held(state.params), whole, 1.3 * whole)

  def test_flops_by_hand(self):
    d, heads, context = 2048, 32, 1000
    layer = 2 * d * heads * 128 + 2 * d * 4 * 128 + d * 128
    layer += 8 * 3 * d * 768 + heads * 2 * 128 * context
    want = 2 * (48 * layer + d * 151_936)
    got = flops.forward(qwen3_30b_a3b.experiment().model, context)
    self.assertAlmostEqual(got / want, 1, delta=1e-4)
    # A query becomes one of the latent, a sum of latents becomes a value.
    d, heads, latent = 7168, 64, 512
    attention = d * 1536 + 1536 * heads * (128 + 64) + d * (latent + 64)
    attention += heads * (128 * latent + latent * 128 + 128 * d)
    attention += heads * (latent + 64 + latent) * context
    moe = d * 384 + (8 + 1) * 3 * d * 2048
    want = 2 * (61 * attention + 3 * d * 18_432 + 60 * moe + d * 163_840)
    got = flops.forward(kimi_k2.experiment().model, context)
    self.assertAlmostEqual(got / want, 1, delta=1e-4)

  def test_a_mesh_that_does_not_divide(self):
    done = subprocess.run(
        [
            *(sys.executable, '-m', 'experiments.rl', '--config=kimi_k2'),
            *('--workdir=/nowhere', '--dry_run', '--set=mesh.expert=5'),
        ],
        cwd=pathlib.Path(__file__).parents[1],
        capture_output=True,
        text=True,
    )
    self.assertEqual((done.returncode, done.stdout), (2, ''))
    self.assertIn('mesh.expert=5: must divide experts=384', done.stderr)
    self.assertLen(done.stderr.strip().splitlines(), 1)


if __name__ == '__main__':
  absltest.main()
