"""Dataclasses that show themselves by what is not as usual."""

from dataclasses import fields, replace


class Described:
    """Base of dataclasses: ``str()`` is the call that makes it, without what is the default."""

    def __str__(self) -> str:
        given = [(each, getattr(self, each.name)) for each in fields(self)]
        shown = ", ".join(
            f"{each.name}={value if isinstance(value, Described) else repr(value)}"
            for each, value in given
            if value != each.default
        )
        return f"{type(self).__name__}({shown})"


class WithActions(Described):
    """Base of dataclasses with ``actions``: each of them has a line of its own."""

    def __str__(self) -> str:
        lines = [super(WithActions, replace(self, actions=())).__str__()]
        lines += [f"  {number:3} {action}" for number, action in enumerate(self.actions)]
        return "\n".join(lines)
