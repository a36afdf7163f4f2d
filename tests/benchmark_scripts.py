"""The scripts in benchmarks/, imported."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

BENCHMARKS = Path(__file__).parents[1] / 'benchmarks'


def benchmark_script(name: str) -> ModuleType:
    """benchmarks/NAME.py as a module. It finds its neighbors as if it were run."""
    spec = importlib.util.spec_from_file_location(f'benchmark_{name}', BENCHMARKS / f'{name}.py')
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module
    sys.path.insert(0, str(BENCHMARKS))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(BENCHMARKS))
    return module
