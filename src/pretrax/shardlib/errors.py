"""What shardlib says when a type is wrong: the annotation, the shapes, the mesh, and the likely mend."""

from typing import Any


class ShardingError(TypeError):
    """An array does not have the type that the program says it has. Raised while tracing, never at run time."""

    def __init__(self, message: str, *, found: str | None = None, mesh: Any = None, mend: str | None = None):
        lines = [message]
        if found is not None:
            lines.append(f'  found: {found}')
        if mesh is not None:
            lines.append(f'  mesh:  {", ".join(f"{axis}={size}" for axis, size in mesh.shape.items()) or "none"}')
        if mend is not None:
            lines.append(f'  mend:  {mend}')
        super().__init__('\n'.join(lines))
