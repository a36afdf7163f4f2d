"""Model FLOPs utilization (MFU): the FLOPs per token of a model, over the peak of the devices."""

from typing import NamedTuple

import jax
from jax.sharding import Mesh

from pretrax.cost.devices import lookup
from pretrax.cost.flops import FORMULA_VERSION, Flops, flops_per_token, forward_flops_per_token, mfu
from pretrax.model.base import Model
from pretrax.system.cpu import forget_peak, measured_cpu


class Utilization(NamedTuple):
    """MFU as a function of tokens per second."""

    per_token: Flops | None  # training FLOPs; None: not known
    peak: float | None  # FLOP/s of a device in the compute dtype; None: not known
    devices: int  # number of devices
    source: str  # where the peak comes from, or why there is no MFU; a line of the start-up report
    is_measured: bool = False  # whether the peak was measured on this machine

    def __call__(self, tokens_per_second: float) -> dict[str, float]:
        """`mfu` and `mfu_full`. A value that is unknown or over 1 is left out: no device is faster than its peak."""
        if self.per_token is None or self.peak is None:
            return {}
        counts = {'mfu': self.per_token.causal, 'mfu_full': self.per_token.full}
        found = {name: mfu(tokens_per_second, flops, self.peak, self.devices) for name, flops in counts.items()}
        return {name: value for name, value in found.items() if value <= 1}

    def is_exceeded(self, tokens_per_second: float) -> bool:
        """Whether the work done is more than the peak allows."""
        return self.peak is not None and 'mfu' not in self(tokens_per_second)

    def explain_excess(self, tokens_per_second: float) -> str:
        """Why there is no MFU at a speed that exceeds the peak. A measured peak is measured again by the next run."""
        assert self.per_token is not None
        assert self.peak is not None
        speed = tokens_per_second * self.per_token.causal / self.devices
        cause = 'the peak, or the count of FLOPs per token, does not fit this model and device'
        if self.is_measured:
            forget_peak()
            cause = 'it was measured while the machine was busy, and the next run measures it again'
        return (
            f'mfu: left out, since {_tflops(speed)} per device is more than the peak of {_tflops(self.peak)}: {cause}; '
            'log.peak_tflops sets the peak'
        )


def training_flops(model: Model, sequence_length: int) -> Flops | None:
    """Training FLOPs per token, with a teacher's; None if the model has no architecture or FLOPs of its own."""
    arch, own = model.arch, model.flops_per_token
    if arch is None:
        return None if own is None else Flops(own, own)
    of_model = flops_per_token(arch, sequence_length)
    return (
        of_model
        if model.teacher_arch is None
        else of_model + forward_flops_per_token(model.teacher_arch, sequence_length)
    )


def choose_utilization(mesh: Mesh, compute: str, per_token: Flops | None, peak_tflops: float | None) -> Utilization:
    """The MFU of a run. `compute` is the compute dtype; `peak_tflops` is the peak that the user gives."""
    devices = list(mesh.devices.flat)
    if per_token is None:
        return Utilization(None, None, len(devices), 'not measured: the FLOPs of this model are not known')
    kind, is_measured = devices[0].device_kind, False
    if peak_tflops is not None:
        peak, origin = peak_tflops * 1e12, 'log.peak_tflops'
    else:
        is_measured = devices[0].platform == 'cpu'
        device = measured_cpu(jax.local_devices()) if is_measured else lookup(kind)
        if device is None:
            why = f"not measured: the peak of '{kind}' is not known; log.peak_tflops sets it"
            return Utilization(per_token, None, len(devices), why)
        peak = device.peak(compute)
        origin = f'{device.name}, {device.source}' if is_measured else device.name
    source = f'of {_tflops(peak)} per device, {origin}; formula {FORMULA_VERSION}, causal'
    return Utilization(per_token, peak, len(devices), source, is_measured)


def _tflops(speed: float) -> str:
    return f'{speed / 1e12:,.3g} TFLOP/s'
