"""Follows the configuration of a run through the functions of pretrax, with the syntax trees of its files only.

From a function, every function, method, property and class that its body names is followed, in the order of the lines,
once. Types come from annotations and from what constructors are given. The registry is the end of a path: what it
builds gets a section.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).parents[1] / 'src'
CONFIG = ('pretrax.config.schema', 'RunConfig')
Symbol = tuple[str, str]  # a module, and a name in it; of a method 'Class.name'


class Flow(NamedTuple):
    """The functions that hold the whole configuration, in the order in which a reader meets them."""

    stays: list[Symbol]

    @property
    def modules(self) -> set[str]:
        return {module for module, _ in self.stays}

    @property
    def returns(self) -> int:
        """How often the path enters a module that it has left."""
        entered = [module for i, (module, _) in enumerate(self.stays) if i == 0 or self.stays[i - 1][0] != module]
        return len(entered) - len(set(entered))


class Sources:
    """The definitions of all modules of a package."""

    def __init__(self, root: Path = SOURCE, package: str = 'pretrax'):
        self.package = package
        self.definitions: dict[Symbol, ast.AST] = {}
        self.imports: dict[str, dict[str, Symbol]] = {}
        for path in sorted((root / package).rglob('*.py')):
            parts = path.relative_to(root).with_suffix('').parts
            module = '.'.join(parts[:-1] if parts[-1] == '__init__' else parts)
            tree = ast.parse(path.read_text())
            self.imports[module] = dict(_imported(tree))
            for node in tree.body:
                if isinstance(node, ast.FunctionDef | ast.ClassDef):
                    self.definitions[module, node.name] = node
                for inner in node.body if isinstance(node, ast.ClassDef) else ():
                    if isinstance(inner, ast.FunctionDef):
                        self.definitions[module, f'{node.name}.{inner.name}'] = inner

    def find(self, module: str, name: str) -> Symbol | None:
        """Where a name of a module is defined, through re-exports; None: not in the package."""
        if (module, name) in self.definitions:
            return module, name
        target = self.imports.get(module, {}).get(name)
        return self.find(*target) if target and target[0].startswith(self.package) else None

    def annotated(self, module: str, annotation: ast.AST | None) -> Symbol | None:
        """The class that an annotation names, also in `X | None`, `Iterator[X]` and in quotes."""
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            annotation = ast.parse(annotation.value, mode='eval')
        for node in ast.walk(annotation) if annotation else ():
            if isinstance(node, ast.Name) and isinstance(
                self.definitions.get(found := self.find(module, node.id) or ('', '')), ast.ClassDef
            ):
                return found
        return None

    def member(self, cls: Symbol, name: str) -> tuple[Symbol | None, Symbol | None]:
        """The method of a class, and the type of an attribute: a field, a property, or what `__init__` assigns."""
        module, class_name = cls
        method = (module, f'{class_name}.{name}')
        if isinstance(node := self.definitions.get(method), ast.FunctionDef):
            return method, self.annotated(module, node.returns)
        body = getattr(self.definitions[cls], 'body', ())
        for field in body:
            if isinstance(field, ast.AnnAssign) and getattr(field.target, 'id', None) == name:
                return None, self.annotated(module, field.annotation)
        init = self.definitions.get((module, f'{class_name}.__init__'))
        if isinstance(init, ast.FunctionDef):
            types = _parameters(self, module, init, cls)
            for node in ast.walk(init):
                for target, value in _pairs(node):
                    if isinstance(target, ast.Attribute) and target.attr == name:
                        return None, _Body(self, module, types).type_of(value)
        return None, None


def _imported(tree: ast.AST) -> Iterator[tuple[str, Symbol]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from ((alias.asname or alias.name, (node.module, alias.name)) for alias in node.names)


def _pairs(node: ast.AST) -> Iterator[tuple[ast.AST, ast.expr]]:
    """(target, value) of an assignment, element by element, or of a `with`."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                yield from zip(target.elts, node.value.elts, strict=False)
            elif isinstance(target, ast.Tuple):
                yield from ((element, node.value) for element in target.elts)
            else:
                yield target, node.value
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        yield node.target, node.value
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        yield node.optional_vars, node.context_expr


def _parameters(sources: Sources, module: str, function: ast.FunctionDef, cls: Symbol | None) -> dict[str, Symbol]:
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    types = {one.arg: found for one in arguments if (found := sources.annotated(module, one.annotation))}
    return types | ({arguments[0].arg: cls} if cls and arguments else {})


class _Body:
    """The types of the names in the body of a function."""

    def __init__(self, sources: Sources, module: str, types: dict[str, Symbol]):
        self.sources, self.module, self.types = sources, module, types

    def named(self, node: ast.AST) -> tuple[Symbol | None, Symbol | None]:
        """The definition that an expression names, and the type of its value."""
        if isinstance(node, ast.Name):
            known = self.types.get(node.id)
            return (None, known) if known else (self.sources.find(self.module, node.id), None)
        if isinstance(node, ast.Attribute):
            cls = self.type_of(node.value)
            if cls:
                return self.sources.member(cls, node.attr)
            base, _ = self.named(node.value)
            is_class = base and isinstance(self.sources.definitions.get(base), ast.ClassDef)
            return self.sources.member(base, node.attr) if base and is_class else (None, None)
        return None, None

    def type_of(self, node: ast.AST) -> Symbol | None:
        """The class of the value of an expression; None: not known."""
        if isinstance(node, ast.Call):
            found, returned = self.named(node.func)
            definition = self.sources.definitions.get(found) if found else None
            if isinstance(definition, ast.ClassDef):
                return found
            if isinstance(definition, ast.FunctionDef) and found:
                return self.sources.annotated(found[0], definition.returns)
            return returned
        if isinstance(node, ast.BoolOp):
            return next((found for value in node.values if (found := self.type_of(value))), None)
        return self.named(node)[1]


def follow(start: Symbol, sources: Sources, wanted: Symbol = CONFIG) -> Flow:
    """The flow of objects of the class `wanted` from a function on."""
    stays: list[Symbol] = []
    seen: set[Symbol] = set()

    def visit(symbol: Symbol) -> None:
        if symbol in seen or symbol[0] == 'pretrax.config.registry':
            return
        seen.add(symbol)
        module, name = symbol
        node = sources.definitions[symbol]
        if isinstance(node, ast.ClassDef):
            for method in ('__init__', '__post_init__'):
                if (module, f'{name}.{method}') in sources.definitions:
                    visit((module, f'{name}.{method}'))
            return
        assert isinstance(node, ast.FunctionDef)
        cls = (module, name.split('.')[0]) if '.' in name else None
        body = _Body(sources, module, _parameters(sources, module, node, cls))
        if wanted in body.types.values() and cls != wanted:
            stays.append(symbol)

        def read(part: ast.AST) -> None:
            for target, value in _pairs(part):
                if isinstance(target, ast.Name) and (found := body.type_of(value)):
                    body.types[target.id] = found
            if isinstance(part, ast.FunctionDef):
                body.types.update(_parameters(sources, module, part, None))
            if isinstance(part, ast.Name | ast.Attribute):
                definition, kind = body.named(part)
                if wanted == kind and cls != wanted and symbol not in stays:
                    stays.append(symbol)
                if definition:
                    visit(definition)
            for child in ast.iter_child_nodes(part):
                read(child)

        for statement in node.body:
            read(statement)

    visit(start)
    return Flow(stays)


if __name__ == '__main__':
    flow = follow(('pretrax.run.loop', 'train'), Sources())
    for one in flow.stays:
        print(*one)
    print(len(flow.stays), 'stays in', len(flow.modules), 'modules,', flow.returns, 'returns')
