"""Where the results of groups go: the rows of the caller's output and LSE."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import frozen
from torch import Tensor

if TYPE_CHECKING:
    from attnplug.torch_backend.plan import Group


@frozen(eq=False)
class Results:
    """
    Output and LSE, their heads grouped by KV head.

    Attributes:
        output: ``(tokens, num_kv_heads, ratio, head_size_v)``, or of a group ``(members, rows, num_kv_heads, ...)``.
        lse: The same without the last axis, float32; None where nobody asked.
        sinks: ``(num_kv_heads, ratio)`` float32, what results are put with; None for none. With sink ``s`` the
            denominator grows from ``exp(lse)`` to ``exp(lse) + exp(s)``: the output shrinks by ``sigmoid(lse - s)``.
    """

    output: Tensor
    lse: Tensor | None
    sinks: Tensor | None

    def clear(self, start: int, end: int) -> None:
        """Set rows that attend nothing: output 0, and of the LSE what the sinks leave."""
        self.output[start:end] = 0
        if self.lse is not None:
            self.lse[start:end] = -torch.inf if self.sinks is None else self.sinks

    @property
    def needs_lse(self) -> bool:
        """Whether results are put with their LSE, be it that a sink enters by it."""
        return self.lse is not None or self.sinks is not None

    def of(self, group: Group) -> Results:
        """Return a group's results: views of these where its rows lie together, else fresh memory for `keep`."""
        shape, where = (group.members, group.rows), group.queries.put
        if isinstance(where, slice):
            lse = None if self.lse is None else part(self.lse, where).view(*shape, *self.lse.shape[1:])
            return Results(part(self.output, where).view(*shape, *self.output.shape[1:]), lse, self.sinks)
        lse = None if self.lse is None else self.lse.new_empty(*shape, *self.lse.shape[1:])
        return Results(self.output.new_empty(*shape, *self.output.shape[1:]), lse, self.sinks)

    def part(self, members: slice) -> Results:
        """Return those of some members of a group, as views."""
        if members.stop - members.start == self.output.shape[0]:
            return self
        return Results(self.output[members], None if self.lse is None else self.lse[members], self.sinks)

    def put(self, start: int, end: int, output: Tensor, lse: Tensor | None) -> None:
        """Write the rows of a tile into a group's results, as the sinks leave them."""
        if self.sinks is not None and lse is not None:
            output = output * torch.sigmoid(lse - self.sinks).unsqueeze(-1)
            lse = torch.logaddexp(lse, self.sinks)
        rows = slice(start, end)
        part(self.output, rows, axis=1).copy_(output)
        if self.lse is not None and lse is not None:
            part(self.lse, rows, axis=1).copy_(lse)

    def keep(self, group: Group, results: Results) -> None:
        """Take a group's results in, padding left out; nothing to do where they are views."""
        kept, put = group.queries.kept, group.queries.put
        if isinstance(put, slice):
            return
        for mine, theirs in ((self.output, results.output), (self.lse, results.lse)):
            if mine is not None and theirs is not None:
                rows = theirs.flatten(0, 1)
                mine.index_copy_(0, put, rows if kept is None else rows.index_select(0, kept))


def part(tensor: Tensor, where: slice, axis: int = 0) -> Tensor:
    """Return `where` of an axis, a view; the tensor itself where that is all, as it is for most decodes."""
    count = where.stop - where.start
    return tensor if count == tensor.shape[axis] else tensor.narrow(axis, where.start, count)
