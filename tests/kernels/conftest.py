"""Triton tests: TRITON_INTERPRET is read at import and decides which run.

TRITON_INTERPRET=1 python -m pytest tests/kernels  # values and gradients
python -m pytest tests/kernels                     # compilation for sm_90
"""

import jax
import triton

_INTERPRETING = triton.knobs.runtime.interpret

collect_ignore_glob = [
    '*_lower_test.py' if _INTERPRETING else '*_interpret_test.py'
]

# A callback that waits for its operands must not hold the only thread.
jax.config.update('jax_cpu_enable_async_dispatch', False)
