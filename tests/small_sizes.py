"""The kernel suite's GPU script, small enough for any machine."""

from composer_jax import config
from experiments.bench_suites import gpu_checks

MODEL = config.ModelConfig(
    vocab=96,
    layers=1,
    embed=32,
    q_heads=4,
    kv_heads=2,
    head_dim=16,
    experts=4,
    top_k=2,
    moe_ffn=16,
)
SIZES = gpu_checks.Sizes(
    MODEL,
    tokens=128,
    row=64,
    sequences=2,
    context=64,
    checked=32,
)
