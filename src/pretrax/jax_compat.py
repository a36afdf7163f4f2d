"""Private names of JAX that pretrax needs, each with the JAX version it was checked with and what would replace it.

No other file imports `jax._src` (tests/test_house.py). When JAX is upgraded, this is the file to read.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import jax
from jax._src import cloud_tpu_init, clusters, compiler, distributed, xla_bridge
from jax.experimental import serialize_executable
from jaxlib import xla_client

# Logger that warns about TPU topologies for which JAX has no rule. JAX 0.12; a public setting for the warning.
MESH_LOGGER = 'jax._src.mesh_utils'

# Classes that occur in the pickle of an executable. JAX 0.12; a public format for executables that is not a pickle.
_CLASSES = {
    'jax._src.interpreters.pxla': 'UnloadedMeshExecutable AllArgsInfo',
    'jaxlib._jax': 'DeviceList PjRtLayout',
    'jax._src.core': 'ShapedArray ManualAxisType MemorySpace',
    'jax._src.named_sharding': '_unpickle_named_sharding',
    'jax._src.mesh': 'AbstractMesh Mesh AxisType AbstractDevice',
    'jax._src.layout': 'AutoLayoutSingleton Layout',
    'jax._src.linear_util': 'DebugInfo',
    'jax._src.stages': 'ArgInfo',
    'jax': 'P',
    'numpy': 'dtype ndarray',
    'numpy._core.multiarray': '_reconstruct',
}
EXECUTABLE_CLASSES = frozenset((module, name) for module, names in _CLASSES.items() for name in names.split())
ExecutableUnpickler = serialize_executable._JaxPjrtUnpickler


def coordination_client() -> Any:
    """The key-value store that all processes of a run share. JAX 0.12; a public `jax.distributed` client."""
    client = distributed.global_state.client
    assert client is not None
    return client


def coordinator_address() -> str:
    """HOST:PORT of process 0, as this process knows it. JAX 0.12; a public attribute of `jax.distributed`."""
    return str(distributed.global_state.coordinator_address)


def parse_xla_flags() -> None:
    """Makes XLA read XLA_FLAGS; an unknown flag ends the process. JAX 0.12; a public function that checks them."""
    xla_client.CompileOptions()


def has_started() -> bool:
    """Whether this process has used devices, and can join no others. JAX 0.12; a function that starts nothing."""
    return xla_bridge.backends_are_initialized()


def detected_identity() -> tuple[int, int, str, int | None] | None:
    """(number of processes, index of this one, address of the first, its index on this host) under Slurm or on TPUs;
    None: it is the only one.

    JAX's own detection also asks the server of any Kubernetes cluster, often without permission, and looks for the
    address of a single process for minutes. JAX 0.12; a public function that detects without connecting.
    """
    kinds = (kind for kind in clusters.ClusterEnv._cluster_types if kind.name in ('slurm', 'gketpu', 'gcetpu'))
    cluster = next((kind for kind in kinds if kind.is_env_present()), None)
    if cluster is None or (count := cluster.get_process_count()) == 1:
        return None
    address = cluster.get_coordinator_address(300, os.environ.get('JAX_COORDINATOR_PORT'))
    return (
        count,
        cluster.get_process_id(),
        address,
        None if cloud_tpu_init.running_in_cloud_tpu_vm else cluster.get_local_process_id(),
    )


def can_be_loaded(devices: Sequence[jax.Device]) -> bool:
    """False for a CPU program of several devices, which must be compiled by each process that runs it.

    XLA orders the collectives of a program that it compiles. It loses the order when it loads the program, so that two
    independent collectives start in a different order on each device, and both wait. JAX 0.11.2 and 0.12.
    """
    return len(devices) == 1 or devices[0].platform != 'cpu'


def cache_only_what_can_be_loaded() -> None:
    """Keeps other programs out of the compilation cache. JAX 0.12; collectives that keep their order."""
    make_key = compiler._get_cache_key
    if make_key.__module__ == __name__:
        return

    def key(options: Any, backend: Any, computation: Any, devices: Any, *more: Any) -> str | None:
        return make_key(options, backend, computation, devices, *more) if can_be_loaded(devices.flat) else None

    compiler._get_cache_key = key


def cudnn_attention() -> ModuleType:
    """NVIDIA's fused attention with offsets of packed documents. JAX 0.12; offsets in `dot_product_attention`."""
    from jax._src.cudnn import fused_attention_stablehlo

    return fused_attention_stablehlo


def assume_cudnn(capability: str) -> None:
    """Answers JAX's checks of cuDNN for a GPU that is not in this machine, so that a step can be compiled for it.

    JAX 0.12; checks against the devices that are compiled for, instead of those of the local backend.

    Args:
        capability: capability of the GPU, such as '9.0'.
    """
    cudnn: Any = cudnn_attention()
    cudnn.check_cudnn_version = lambda: 91900
    cudnn.check_compute_capability = lambda capability: True
    cudnn.is_cuda_compute_capability_equal = lambda wanted: wanted == capability


@contextlib.contextmanager
def pallas_results_vary_like(kind: Any) -> Iterator[None]:
    """Results of Pallas calls inside the block vary over the mesh like `kind`, unless they declare it themselves.

    JAX's own TPU kernels do not declare it (`manual_axis_type` of their results), and nothing public declares it from
    outside. JAX 0.12; kernels that declare it.
    """
    from jax._src.pallas import core

    read = core._convert_out_shape_to_aval

    def read_with_kind(declared: Any) -> Any:
        if isinstance(declared, jax.ShapeDtypeStruct) and declared.manual_axis_type is None:
            declared = declared.update(manual_axis_type=kind)
        return read(declared)

    core._convert_out_shape_to_aval = read_with_kind
    try:
        yield
    finally:
        core._convert_out_shape_to_aval = read
