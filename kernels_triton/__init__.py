"""The model's operations, each as a JAX reference and as a Triton kernel.

An op is one module: its function, its reference (JAX, in blocks of constant
shape; what a CPU runs) and the entry of its Triton half. The kernels stand in
`*_kernel.py` and are imported where they run. So the router is read from
`composer_jax/model/moe.py`, where a layer calls it, to `router.py`; only a GPU
goes on to `router_kernel.py`.

`launch.py` is the one seam between the halves: it says which of them runs, and
it starts the kernels. `contract.py` has the block sizes that both roles share
and the bits depend on; `rows.py` cuts rows into blocks.
"""
