"""Model FLOPs utilization (MFU): the FLOPs per token of a model, over the peak of the devices."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from pretrax.machine.cpu import measured_cpu
from pretrax.model.base import Model
from pretrax.scale.devices import lookup
from pretrax.scale.flops import FORMULA_VERSION, Flops, flops_per_token, forward_flops_per_token, mfu

Utilization = Callable[[float], dict[str, float]]  # tokens per second -> metrics; none if the peak is not known


def training_flops(model: Model, sequence_length: int) -> Flops | None:
    """Training FLOPs per token, with those of a teacher; None if the model has neither an architecture nor FLOPs of its own."""
    arch, own = model.arch, model.flops_per_token
    if arch is None:
        return None if own is None else Flops(own, own)
    of_model = flops_per_token(arch, sequence_length)
    return (
        of_model
        if model.teacher_arch is None
        else of_model + forward_flops_per_token(model.teacher_arch, sequence_length)
    )


def choose_utilization(mesh: Mesh, compute: Any, per_token: Flops | None) -> tuple[Utilization, str]:
    """MFU as a function of tokens per second, and a description for the start-up report."""
    if per_token is None:
        return lambda _: {}, 'not measured: the FLOPs of this model are not known'
    devices = list(mesh.devices.flat)
    kind = devices[0].device_kind
    device = measured_cpu(jax.local_devices()) if devices[0].platform == 'cpu' else lookup(kind)
    if device is None:
        return lambda _: {}, f"not measured: the peak of '{kind}' is not known"
    peak = device.peak(compute)

    def metrics(tokens_per_second: float) -> dict[str, float]:
        return {
            'mfu': mfu(tokens_per_second, per_token.causal, peak, len(devices)),
            'mfu_full': mfu(tokens_per_second, per_token.full, peak, len(devices)),
        }

    reason = f'{device.name}, formula {FORMULA_VERSION}, causal'
    return metrics, f'of {peak / 1e12:,.3g} TFLOP/s per device, {reason}'
