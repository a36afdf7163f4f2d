"""Eight simulated CPU devices for every test, decided before JAX is imported."""

import os

os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['JAX_ENABLE_COMPILATION_CACHE'] = 'false'  # nothing from the user's home, and nothing into it
# Eight devices take turns on few cores: a collective may wait long for the last of them. Small programs that run a few times
# are not worth optimising: tests/run/test_equivalence.py takes a third less CPU time. tests/docs runs what users run.
os.environ['XLA_FLAGS'] = ' '.join([
    '--xla_force_host_platform_device_count=8', '--xla_cpu_collective_call_terminate_timeout_seconds=600',
    '--xla_backend_optimization_level=0',
])  # fmt: skip

import hypothesis

hypothesis.settings.register_profile('pretrax', deadline=None, derandomize=True)
hypothesis.settings.load_profile('pretrax')
