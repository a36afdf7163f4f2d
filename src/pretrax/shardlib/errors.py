"""The error for a wrong array type: the annotation, the shapes, the mesh, and the likely fix."""

from typing import Any


class ShardingError(TypeError):
    """An array does not have its annotated type. Raised while tracing, never at run time."""

    def __init__(self, message: str, *, found: str | None = None, mesh: Any = None, fix: str | None = None):
        lines = [message]
        if found is not None:
            lines.append(f'  found: {found}')
        if mesh is not None:
            lines.append(f'  mesh:  {", ".join(f"{axis}={size}" for axis, size in mesh.shape.items()) or "none"}')
        if fix is not None:
            lines.append(f'  fix:   {fix}')
        super().__init__('\n'.join(lines))
