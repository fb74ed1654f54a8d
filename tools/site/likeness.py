"""A griffe extension: a function under `@taking_what_is(x)` is shown with the parameters and the description of x, as help() shows it."""

import griffe

DECORATOR = "taking_what_is"


class Likeness(griffe.Extension):
    def on_package(self, *, pkg: griffe.Module, **_) -> None:
        for function in _functions(pkg):
            for decorator in function.decorators:
                call = decorator.value
                if not isinstance(call, griffe.ExprCall) or str(call.function).rpartition(".")[2] != DECORATOR:
                    continue
                likeness = function.parent.resolve(str(call.arguments[0]))
                like = pkg[likeness.removeprefix(f"{pkg.name}.")]
                function.parameters, function.returns, function.docstring = like.parameters, like.returns, like.docstring


def _functions(module: griffe.Object):
    for member in module.members.values():
        if member.is_alias:
            continue
        if member.is_function:
            yield member
        elif member.is_module or member.is_class:
            yield from _functions(member)
