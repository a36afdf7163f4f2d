"""Eight simulated CPU devices for every test, decided before JAX is imported."""

import os

os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['JAX_ENABLE_COMPILATION_CACHE'] = 'false'  # nothing from the user's home, and nothing into it
# Eight devices take turns on few cores: a collective may wait long for the last of them.
os.environ['XLA_FLAGS'] = (
    '--xla_force_host_platform_device_count=8 --xla_cpu_collective_call_terminate_timeout_seconds=600'
)

import hypothesis

hypothesis.settings.register_profile('pretrax', deadline=None, derandomize=True)
hypothesis.settings.load_profile('pretrax')
